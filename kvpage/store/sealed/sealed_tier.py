"""SealedTier: a tier whose records are sealed on their way in, and opened on their way out.

    create, piece, ..  ─► frames ─► sealed ─► the tier's own writer
    open, piece, ..    ◄─ frames ◄─ opened ◄─ the tier's own reader

Callers see plain records. A record that is not sealed, or whose seal is broken, is wrong: it is dropped by whoever
reads it. One whose key is not here is a miss and stays, since others may have the key. From then on it counts as
missing, so that it is stored anew.
"""

import threading
from collections.abc import Iterator, Sequence

from kvpage.store.disk.reader_writer import STAGING_BYTES, Buffers
from kvpage.store.sealed.seal_keys import SealKeys
from kvpage.store.sealed.sealed_reader import SealedReader
from kvpage.store.sealed.sealed_record import new_aes, sealed_bytes_of
from kvpage.store.sealed.sealed_writer import SealedWriter
from kvpage.store.tiers.tier import Key, Note, Reader, RecordInfo, Tier, TierStats, Writer

MAX_LOCKED = 1 << 16  # records whose key is not here, that are remembered


class SealedTier(Tier):
    """Another tier's records, sealed. It owns that tier.

    Attributes:
        name: that of the tier.
        is_read_only: likewise.

    Args:
        tier: keeps the sealed records.
        keys: the secrets.

    Raises:
        ImportError: the package cryptography is not there.
    """

    def __init__(self, tier: Tier, keys: SealKeys) -> None:
        new_aes(keys.keys[0][1])  # before the first record needs it
        self.name, self.is_read_only = tier.name, tier.is_read_only
        self._tier, self._keys = tier, keys
        self._buffers = Buffers(STAGING_BYTES)
        self._lock = threading.Lock()
        self._locked: dict[Key, None] = {}

    @property
    def within(self) -> Tier:
        """The tier that keeps the sealed records."""
        return self._tier

    def watch(self, note: Note | None) -> None:
        self._tier.watch(note)

    def contains(self, keys: Sequence[Key], timeout: float | None = None) -> list[bool]:
        there = self._tier.contains(keys, timeout)
        if not self._locked:
            return there
        with self._lock:
            return [is_there and key not in self._locked for key, is_there in zip(keys, there, strict=True)]

    def touch(self, keys: Sequence[Key], timeout: float | None = None) -> list[bool]:
        return self._tier.touch(keys, timeout)

    def open(self, keys: Sequence[Key], timeout: float | None = None) -> list[Reader | None]:
        readers = self._tier.open(keys, timeout)
        return [
            None if reader is None else SealedReader(reader, key, self._keys, self._buffers, self._lock_out)
            for key, reader in zip(keys, readers, strict=True)
        ]

    def create(self, key: Key, num_bytes: int) -> Writer | None:
        if num_bytes < 1:
            raise ValueError(f"num_bytes must be positive, got {num_bytes}")
        writer = self._tier.create(key, sealed_bytes_of(self._keys.keys[0][0], num_bytes))
        return None if writer is None else SealedWriter(self, writer, num_bytes, self._keys, self._buffers)

    def commit(self, writers: Sequence[Writer], timeout: float | None = None) -> list[bool]:
        sealed = [writer for writer in writers if isinstance(writer, SealedWriter) and writer.owner is self]
        if len(sealed) != len(writers):
            raise ValueError("writers must be this tier's")
        for writer in sealed:
            writer.check_whole()
        there = self._tier.commit([writer.finished() for writer in sealed], timeout)
        with self._lock:
            for writer, is_there in zip(sealed, there, strict=True):
                if is_there:
                    self._locked.pop(writer.key, None)
        for writer in sealed:
            writer.close()
        return there

    def remove(self, keys: Sequence[Key], timeout: float | None = None) -> int:
        count = self._tier.remove(keys, timeout)
        with self._lock:
            for key in keys:
                self._locked.pop(key, None)
        return count

    def infos(self) -> Iterator[RecordInfo]:
        return self._tier.infos()

    def clear(self) -> None:
        self._tier.clear()
        with self._lock:
            self._locked.clear()

    def flush(self, sync: bool = False) -> None:
        self._tier.flush(sync)

    def stats(self) -> TierStats:
        return self._tier.stats()

    def close(self) -> None:
        self._tier.close()

    def _lock_out(self, key: Key) -> None:
        """Remember a record whose key is not here."""
        with self._lock:
            self._locked[key] = None
            if len(self._locked) > MAX_LOCKED:
                del self._locked[next(iter(self._locked))]

"""StateIndex: the positions after each prefix of whole chunks that have a state, so that they need not be guessed.

    prefix of 2 chunks    [ 5, key of the state ] [ 9, key of the state ] ..     one record, replaced by longer ones

A reader takes the entries of all tiers together. A fast tier that lacks another process's entries hides nothing.
An entry only says where to look: one that is stale leads to no record, and one that is lost is a miss. A full index
drops entries that were neither added lately nor on the way of one that was: the end of a shared system prompt stays.
"""

import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvpage.store.bytes.pieces import pieces_of
from kvpage.store.bytes.run_payload import RunPayload
from kvpage.store.records.kinds import RecordKind
from kvpage.store.records.payload import Source
from kvpage.store.records.record import CorruptRecord
from kvpage.store.records.record_io import read_head, read_record
from kvpage.store.stack.placed import NO_LIMIT, TimeLimit
from kvpage.store.stack.tier_stack import TierStack
from kvpage.store.states.state_keys import StateKeys
from kvpage.store.tiers.tier import Key, Reader

MAX_ENTRIES = 512
NUM_DROPPED = MAX_ENTRIES // 4  # the first ones, where all entries lead to a state
NUM_FRESH = MAX_ENTRIES // 2  # the last ones, which are not moved to the end again
ENTRY = np.dtype([("rest", "<u4"), ("key", "V32")])

Entries = dict[Key, int]
"""The tokens after the prefix of each state, by its key; those first that were not used for longest."""


class StateIndex:
    """The index records of one StateKeys. Thread-safe. lock: of all indexes of a store, held while an entry is added.

    A prefix is the key of whole chunks, of `num_tokens` tokens in a namespace.
    """

    def __init__(self, tiers: TierStack, keys: StateKeys, lock: threading.Lock) -> None:
        self._tiers, self._keys, self._lock = tiers, keys, lock

    def there(self, prefixes: Sequence[bytes]) -> list[bool]:
        """Return for each prefix whether a tier has an index of it."""
        return [at is not None for at in self._tiers.locate([self._keys.index(prefix) for prefix in prefixes])]

    def read(self, prefix: bytes, num_tokens: int, namespace: bytes) -> Entries:
        """Return the entries of all tiers."""
        key, entries = self._keys.index(prefix), Entries()
        for rows in self._tiers.each(key, lambda reader: self._entries(reader, key, num_tokens, namespace)):
            entries |= {row["key"].tobytes(): int(row["rest"]) for row in rows}
        return entries

    def add(
        self,
        prefix: bytes,
        num_tokens: int,
        namespace: bytes,
        rest: npt.NDArray[np.int32],
        limit: TimeLimit = NO_LIMIT,
    ) -> None:
        """Add an entry, or note its use. A full index drops entries without a state, or the least recently used.

        rest: the state's tokens after the prefix. Two processes that add to one index at once may lose an entry, which
        is a miss.
        """
        key = self._keys.state(prefix, rest)
        with self._lock:
            entries = self.read(prefix, num_tokens, namespace)
            if key in list(entries)[-NUM_FRESH:]:
                return
            for passed in self._on_the_way(prefix, rest, entries):
                entries[passed] = entries.pop(passed)
            entries.pop(key, None)
            if len(entries) >= MAX_ENTRIES:
                entries = self._pruned(entries)
            self._write(prefix, num_tokens, namespace, {**entries, key: len(rest)}, limit)

    def _on_the_way(self, prefix: bytes, rest: npt.NDArray[np.int32], entries: Entries) -> list[Key]:
        """Return the keys of the entries that begin as a state's tokens do."""
        sizes = sorted({size for size in entries.values() if size < len(rest)})
        return [key for key in (self._keys.state(prefix, rest[:size]) for size in sizes) if key in entries]

    def _pruned(self, entries: Entries) -> Entries:
        there = self._tiers.locate(list(entries))
        entries_there = [entry for entry, at in zip(entries.items(), there, strict=True) if at is not None]
        return dict(entries_there if len(entries_there) < MAX_ENTRIES else entries_there[NUM_DROPPED:])

    def _write(self, prefix: bytes, num_tokens: int, namespace: bytes, entries: Entries, limit: TimeLimit) -> None:
        rows = np.empty(len(entries), ENTRY)
        rows["rest"] = list(entries.values())
        rows["key"] = np.frombuffer(b"".join(entries), "V32")
        payload = RunPayload.of(pieces_of(rows.view(np.uint8), writable=False))
        key = self._keys.index(prefix)

        def record(_: int) -> tuple[RecordKind, Source]:
            return self._keys.index_kind(key, num_tokens, rows.nbytes, namespace), payload

        self._tiers.put([key], record, skip_existing=False, limit=limit)

    def _entries(self, reader: Reader, key: Key, num_tokens: int, namespace: bytes) -> npt.NDArray[np.void]:
        """Return the entries of one tier's record. Raises CorruptRecord."""
        head, _ = read_head(reader, self._keys.meta(namespace))
        if head.raw_bytes != head.payload_bytes or head.raw_bytes % ENTRY.itemsize:
            raise CorruptRecord(f"an index of {head.raw_bytes} bytes has no whole entries")
        data = np.empty(head.raw_bytes, np.uint8)
        kind = self._keys.index_kind(key, num_tokens, head.raw_bytes, namespace)
        read_record(reader, kind, RunPayload.of(pieces_of(data, writable=True)))
        return data.view(ENTRY)

"""ByteJobs: calls on records of bytes, checked when they are made, and run at once or later.

put(keys, buffers) ─► checked: names, payloads, limit ─► Job ─► job() ─► TierStack ─► a result a key

name    SHA-256 over a seed | the caller's key; the seed is a SHA-256 over the header: another header is another name
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvpage.checks.values import as_list, as_real, check_flag
from kvpage.store.bytes.events import ByteEvents
from kvpage.store.bytes.pieces import Piece, Pieces, RunPayload, check_apart, pieces_of
from kvpage.store.records.codec import SPLIT_KINDS, ByteSplitCodec, Codec
from kvpage.store.records.kinds import RecordKind
from kvpage.store.records.record import BYTES_CODEC, Shape
from kvpage.store.records.record_io import Source, read_record
from kvpage.store.stack.placed import TimeLimit
from kvpage.store.stack.tier_stack import TierStack
from kvpage.store.tiers.tier import Key, Reader

Job = Callable[[], list[bool]]
Buffer = Piece | Sequence[Piece] | Pieces | None
MAX_KEY_BYTES = 65535
NO_SHAPE: Shape = (0, 0, 0, 0, 0)


def checked_keys(keys: Sequence[bytes]) -> list[bytes]:
    """Return the keys as a list. Raises TypeError unless they are bytes, ValueError for an empty or too long one."""
    key_list = as_list("keys", keys)
    for key in key_list:
        if not isinstance(key, bytes):
            raise TypeError(f"keys must be bytes, got {type(key).__name__}")
        if not 0 < len(key) <= MAX_KEY_BYTES:
            raise ValueError(f"keys must be of 1 to {MAX_KEY_BYTES} bytes, got one of {len(key)}")
    return key_list


class ByteKeys:
    """Makes the names of records. meta: the encoding of a header. dtype: of the numbers in them; None for bytes."""

    def __init__(self, meta: bytes, dtype: torch.dtype | None = None) -> None:
        self.meta = meta
        self._split = ByteSplitCodec(dtype) if dtype in SPLIT_KINDS else None
        self._item_bytes = dtype.itemsize if dtype else 1
        self._seed = hashlib.sha256(meta).digest()

    def of(self, keys: Sequence[bytes]) -> list[Key]:
        """Return the names of checked keys."""
        return [hashlib.sha256(self._seed + key).digest() for key in keys]

    def kind(self, name: Key, num_bytes: int) -> RecordKind:
        """Return the kind of the record of a name and `num_bytes` bytes."""
        codecs: dict[str, Codec | None] = {BYTES_CODEC: None}
        if self._split is not None and num_bytes % self._item_bytes == 0:
            codecs[self._split.name] = self._split
        return RecordKind(name, self.meta, NO_SHAPE, num_bytes, codecs)


class ByteJobs:
    """Makes jobs, each with a result a key. Wrong arguments raise ValueError or TypeError here, and no job is made."""

    def __init__(self, tiers: TierStack, keys: ByteKeys, events: ByteEvents) -> None:
        self._tiers, self._keys, self._events = tiers, keys, events

    def contains(self, keys: Sequence[bytes], deadline: float | None) -> Job:
        names, limit = self._names(checked_keys(keys)), limit_of(deadline)
        return lambda: [tier is not None for tier in self._tiers.locate(names, limit)]

    def touch(self, keys: Sequence[bytes], deadline: float | None) -> Job:
        names, limit = self._names(checked_keys(keys)), limit_of(deadline)
        return lambda: self._tiers.touch(names, limit)

    def remove(self, keys: Sequence[bytes], deadline: float | None) -> Job:
        names, limit = self._names(checked_keys(keys)), limit_of(deadline)
        return lambda: self._tiers.remove_each(names, limit)

    def put(self, keys: Sequence[bytes], buffers: Sequence[Buffer], skip_existing: bool, deadline: float | None) -> Job:
        check_flag("skip_existing", skip_existing)
        limit, records = limit_of(deadline), self._records(keys, buffers, writable=False)
        names = [kind.key for kind, _ in records.made]
        if len(set(names)) < len(names):
            raise ValueError("keys must be given once where they are put, got one twice")
        for _, payload in records.made:
            payload.check_source()

        def record(index: int) -> tuple[RecordKind, Source]:
            return records.made[index]

        return lambda: records.result(self._tiers.put(names, record, skip_existing, limit).is_there)

    def get_into(self, keys: Sequence[bytes], buffers: Sequence[Buffer], deadline: float | None) -> Job:
        limit, records = limit_of(deadline), self._records(keys, buffers, writable=True)
        names = [kind.key for kind, _ in records.made]

        def read(index: int, reader: Reader, num_threads: int) -> bool:
            return read_record(reader, *records.made[index], num_threads)  # another size is dropped, as damage is

        return lambda: records.result(self._tiers.read_each(names, read, limit))

    def _names(self, keys: Sequence[bytes]) -> list[Key]:
        names = self._keys.of(keys)
        self._events.know(names, keys)
        return names

    def _records(self, keys: Sequence[bytes], buffers: Sequence[Buffer], writable: bool) -> "_Records":
        key_list, memory = checked_keys(keys), as_list("buffers", buffers)
        if len(key_list) != len(memory):
            raise ValueError(f"buffers must be one a key, got {len(memory)} for {len(key_list)} keys")
        indices = [index for index, buffer in enumerate(memory) if buffer is not None]
        pieces = [pieces_of(memory[index], writable) for index in indices]
        if writable:
            check_apart(pieces)
        payloads = [RunPayload.of(record_pieces) for record_pieces in pieces]
        names = self._names([key_list[index] for index in indices])
        kinds = [self._keys.kind(name, payload.num_bytes) for name, payload in zip(names, payloads, strict=True)]
        return _Records(len(key_list), indices, list(zip(kinds, payloads, strict=True)))


class _Records:
    """Records of a call. made: the records with a buffer. indices: of these records among the `num_keys` keys."""

    def __init__(self, num_keys: int, indices: list[int], made: list[tuple[RecordKind, RunPayload]]) -> None:
        self._num_keys, self._indices, self.made = num_keys, indices, made

    def result(self, flags: Sequence[bool]) -> list[bool]:
        """Return a flag for each key of the call; False where there was no buffer."""
        results = [False] * self._num_keys
        for index, flag in zip(self._indices, flags, strict=True):
            results[index] = flag
        return results


def limit_of(deadline: Any) -> TimeLimit:
    """Return the limit of a call that has `deadline` seconds; None for no limit. Raises TypeError or ValueError."""
    if deadline is not None and not 0 <= as_real("deadline", deadline) < float("inf"):
        raise ValueError(f"deadline must be finite seconds of at least 0, or None, got {deadline!r}")
    return TimeLimit.within(None if deadline is None else float(deadline))

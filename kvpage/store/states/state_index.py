"""StateIndex: the positions after each prefix of whole chunks that have a state. StateKeys: the names of their records.

    prefix of 2 chunks    [ 5, key of the state ] [ 9, key of the state ] ..     one record, replaced by longer ones

    seed       SHA-256 over the metadata, the layout's digest and the namespace
    prefix j   the key of the whole chunks before token j * chunk_size, a chain as that of chunks; prefix 0 is the seed
    index      SHA-256 over "index" | prefix j                     which positions there are before the next chunk's end
    state      SHA-256 over "state" | prefix j | the tokens after it, int64

So a state's key determines all of its tokens, and a state of another layout, dtype or namespace has another key.

A reader takes the entries of all tiers together. A fast tier that lacks another process's entries hides nothing.
An entry only says where to look: one that is stale leads to no record, and one that is lost is a miss. A full index
drops entries that were neither added lately nor on the way of one that was: the end of a shared system prompt stays.
"""

import hashlib
import threading
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kvpage.layout.groups import StateLayout
from kvpage.store.bytes.pieces import RunPayload, pieces_of
from kvpage.store.records.keys import ChunkKeys, KVStoreMetadata
from kvpage.store.records.kinds import RecordKind, RecordKinds
from kvpage.store.records.record import INDEX_CODEC, STATE_CODEC, CorruptRecord
from kvpage.store.records.record_io import Source, read_head, read_record
from kvpage.store.stack.placed import NO_LIMIT, TimeLimit
from kvpage.store.stack.tier_stack import TierStack
from kvpage.store.tiers.tier import Key, Reader

STATE, INDEX = b"kvpage-state-1", b"kvpage-index-1"


class StateKeys(ChunkKeys):
    """Makes keys and kinds of records of one layout. The metadata's dtype is left out.

    kinds: of the chunks of K and V beside the states; None for a model without any. Raises TypeError for a layout that
    is no StateLayout, ValueError for metadata too long for a record.
    """

    def __init__(
        self, metadata: KVStoreMetadata, layout: StateLayout, kinds: RecordKinds | None, chunk_size: int
    ) -> None:
        if not isinstance(layout, StateLayout):
            raise TypeError(f"layout must be a StateLayout, got {type(layout).__name__}")
        extra = (*metadata.extra, ("state_layout", f"{layout.digest}{' alone' if kinds is None else ''}"))
        dtype, lossy_codec = (layout.parts[0].dtype, "") if kinds is None else (kinds.dtype, kinds.keys.lossy_codec)
        super().__init__(replace(metadata, kv_dtype=dtype, extra=extra), chunk_size, lossy_codec)
        self.layout, self.slot_bytes = layout, layout.slot_bytes

    def prefixes(self, tokens: npt.NDArray[np.int32], namespace: bytes) -> list[bytes]:
        """Return the key of each prefix of whole chunks, the empty one first."""
        num_whole = len(tokens) // self.chunk_size * self.chunk_size
        return [self._seed(namespace)[1], *self.of(tokens[:num_whole], namespace)]

    def state(self, prefix: bytes, rest: npt.NDArray[np.int32]) -> Key:
        """Return the key of the state after a prefix and the tokens that follow it, less than a chunk."""
        return hashlib.sha256(STATE + prefix + rest.astype("<i8").tobytes()).digest()

    def index(self, prefix: bytes) -> Key:
        """Return the key of the index of a prefix."""
        return hashlib.sha256(INDEX + prefix).digest()

    def state_kind(self, key: Key, num_tokens: int, namespace: bytes) -> RecordKind:
        """Return the kind of the record of a state after `num_tokens` tokens."""
        return RecordKind(key, self.meta(namespace), (0, 0, num_tokens, 0, 0), self.slot_bytes, {STATE_CODEC: None})

    def index_kind(self, key: Key, num_tokens: int, num_bytes: int, namespace: bytes) -> RecordKind:
        """Return the kind of the record of the index of a prefix of `num_tokens` tokens."""
        return RecordKind(key, self.meta(namespace), (0, 0, num_tokens, 0, 0), num_bytes, {INDEX_CODEC: None})


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

"""StateKeys: the names of the records of states, made from a model's metadata, a layout of states, and tokens.

    seed       SHA-256 over the metadata, the layout's digest and the namespace
    prefix j   the key of the whole chunks before token j * chunk_size, a chain as that of chunks; prefix 0 is the seed
    index      SHA-256 over "index" | prefix j                     which positions there are before the next chunk's end
    state      SHA-256 over "state" | prefix j | the tokens after it, int64

So a state's key determines all of its tokens, and a state of another layout, dtype or namespace has another key.
"""

import hashlib
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kvpage.layout.groups import StateLayout
from kvpage.store.records.keys import ChunkKeys, KVStoreMetadata
from kvpage.store.records.kinds import RecordKind, RecordKinds
from kvpage.store.records.record import INDEX_CODEC, STATE_CODEC
from kvpage.store.tiers.tier import Key

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

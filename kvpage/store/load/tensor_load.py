"""TensorLoad: loads a prompt's chunks into one tensor.

tokens    [ chunk 0 | chunk 1 | chunk 2 | ch]
wanted          [ skipped .............. end]       may begin within a chunk
"""

from collections.abc import Sequence

import torch

from kvpage.store.records.kinds import RecordKinds
from kvpage.store.records.kv_tensors import TensorChunk, empty_chunks, token_dim
from kvpage.store.records.record_io import read_record, read_shape
from kvpage.store.stack.tier_stack import TierStack
from kvpage.store.tiers.tier import Key, Reader


class TensorLoad:
    """One load. keys: of all chunks of the prompt. num_skipped: leading tokens that are not wanted."""

    def __init__(
        self,
        kinds: RecordKinds,
        fmt: str,
        keys: Sequence[Key],
        num_tokens: int,
        num_skipped: int,
        namespace: bytes,
    ) -> None:
        self._size = kinds.keys.chunk_size
        self._first = num_skipped // self._size
        self._keys = keys[self._first :]
        self._kinds, self._fmt, self._namespace = kinds, fmt, namespace
        self._num_tokens, self._num_skipped = num_tokens, num_skipped
        self._dim = 2 + token_dim(fmt)

    def run(self, tiers: TierStack) -> torch.Tensor | None:
        """Return K and V from the first wanted token on, as far as tiers have them; None if they have nothing."""
        keys, skipped = self._keys, self._num_skipped
        shape = tiers.first(keys[0], lambda reader: read_shape(reader, self._kinds, self._namespace)) if keys else None
        if shape is None:
            return None
        room = empty_chunks(shape, self._fmt, self._num_tokens - skipped, self._kinds.dtype)
        num_chunks = tiers.read(keys, lambda *found: self._read(room, *found))
        num_found = min((self._first + num_chunks) * self._size, self._num_tokens) - skipped
        return room.narrow(self._dim, 0, num_found) if num_chunks and num_found > 0 else None

    def _read(self, room: torch.Tensor, index: int, reader: Reader, num_threads: int) -> None:
        begin = (self._first + index) * self._size
        first, end = max(begin, self._num_skipped), min(begin + self._size, self._num_tokens)
        rows = room.narrow(self._dim, first - self._num_skipped, end - first)
        chunk = TensorChunk([list(layer) for layer in rows], self._fmt, end - begin)
        read_record(reader, self._kinds.of(self._keys[index], chunk.shape, self._namespace), chunk, num_threads)

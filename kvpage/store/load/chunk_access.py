"""ChunkAccess: the chunks of token sequences in a store's tiers: put there, counted, pinned and loaded.

tokens ─► KnownDtype ─► keys of chunks ─► TierStack
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from kvpage.checks.values import as_integer
from kvpage.store.load.block_chunks import BlockChunks, KnownRows
from kvpage.store.load.block_load import BlockLoad
from kvpage.store.load.device.device_lanes import LanePool
from kvpage.store.load.known_dtype import KnownDtype
from kvpage.store.records.kinds import RecordKind, RecordKinds
from kvpage.store.records.payload import ShapedSource, Source
from kvpage.store.stack.chunk_threads import num_leading
from kvpage.store.stack.pin import Pin
from kvpage.store.stack.tier_stack import TierStack
from kvpage.store.tiers.tier import Key

if TYPE_CHECKING:
    from kvpage.cache.layer_slice import LayerCaches


class ChunkAccess:
    """Thread-safe. chunk_size: tokens of a chunk."""

    def __init__(self, chunk_size: int, dtype: KnownDtype, tiers: TierStack) -> None:
        self._chunk_size, self._dtype, self._tiers = chunk_size, dtype, tiers
        self._rows, self._lanes = KnownRows(), LanePool()
        self._layer_lanes = LanePool()  # of their own: their borrower may wait for the others meanwhile

    def put(
        self,
        kinds: RecordKinds,
        tokens: npt.NDArray[np.int32],
        num_skipped: int,
        chunk: Callable[[int, int], ShapedSource],
        skip_existing: bool,
        namespace: bytes,
    ) -> int:
        """Put the chunks after the skipped tokens into the tiers; return the number that were new to one.

        chunk(begin, end) returns the chunk of these tokens.
        """
        size = self._chunk_size
        keys = kinds.keys.of(tokens, namespace)[num_skipped // size :]

        def record(index: int) -> tuple[RecordKind, Source]:
            begin = num_skipped + index * size
            made = chunk(begin, min(begin + size, len(tokens)))
            return kinds.of(keys[index], made.shape, namespace), made

        num_new = self._tiers.put(keys, record, skip_existing).num_new
        self._tiers.count(stored_chunks=num_new)
        return num_new

    def count(self, tokens: npt.NDArray[np.int32], namespace: bytes) -> int:
        """Return the number of leading tokens whose chunks are in a tier."""
        return min(num_leading(self.there(tokens, namespace)) * self._chunk_size, len(tokens))

    def promote(self, tokens: npt.NDArray[np.int32], namespace: bytes) -> int:
        """Copy the chunks that are in a tier into the faster tiers; return the number of leading tokens there."""
        is_near = self._tiers.promote(self._keys(tokens, namespace))
        return min(num_leading(is_near) * self._chunk_size, len(tokens))

    def there(self, tokens: npt.NDArray[np.int32], namespace: bytes) -> list[bool]:
        """Return for each chunk whether it is in a tier."""
        return [tier is not None for tier in self._tiers.locate(self._keys(tokens, namespace))]

    def pin(self, tokens: npt.NDArray[np.int32], namespace: bytes) -> Pin:
        """Keep the leading chunks that are in a tier."""
        readers = [reader for _, reader in self._tiers.open_leading(self._keys(tokens, namespace))]
        return Pin(min(len(readers) * self._chunk_size, len(tokens)), readers)

    def blocks(self, engine: "LayerCaches", block_table: npt.ArrayLike | torch.Tensor) -> BlockChunks:
        """Return the blocks as chunks. Raises ValueError unless the engine matches the store's metadata and codec."""
        rows, lanes = self._rows.of(engine), (self._lanes, self._layer_lanes)
        blocks = BlockChunks(engine, block_table, self._dtype.metadata, rows, *lanes)
        if self._dtype.codec == "fp8" and len(blocks.units) > 1:
            raise ValueError("codec must be 'raw' or 'zstd' for layers of unlike heads or sizes, got 'fp8'")
        return blocks

    def load(
        self,
        tokens: npt.NDArray[np.int32],
        engine: "LayerCaches",
        block_table: npt.ArrayLike | torch.Tensor,
        start: int,
        namespace: bytes,
    ) -> BlockLoad:
        """Return a load of tokens[start:] into blocks, which has not begun. Raises ValueError for wrong arguments."""
        start = as_integer("start", start)
        blocks = self.blocks(engine, block_table)
        kinds = self._dtype.of(engine.layout.dtype)
        load = BlockLoad(blocks, kinds, kinds.keys.of(tokens, namespace), len(tokens), start, namespace)
        self._dtype.settle(engine.layout.dtype)
        self._tiers.count(query_tokens=load.end - start)
        return load

    def _keys(self, tokens: npt.NDArray[np.int32], namespace: bytes) -> list[Key]:
        """Return the keys of the tokens' chunks; none if no dtype is known and nothing was found."""
        kinds = self._dtype.find(self._tiers, tokens, namespace)
        return [] if kinds is None else kinds.keys.of(tokens, namespace)

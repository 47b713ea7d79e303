"""LayerChunks: the chunks of a cache's layers in a store's tiers, as a view. A store has one of all layers, or several.

    layers   0 1 3 4     | chunk 0 | chunk 1 | chunk 2 | chunk 3 |       full layers: all of them
    layers   2 5         |    .    |    .    | chunk 2 | chunk 3 |       a window: the last ones

Each chunk is found by its tokens and all before them, whether the chunks before it are there or not.

    tokens ─► KnownDtype ─► keys of chunks ─► TierStack
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from kvpage.blocks.explain import Ending, GroupReach
from kvpage.checks.interrupts import uninterrupted
from kvpage.checks.tokens import Tokens
from kvpage.checks.values import as_integer, check_flag
from kvpage.store.load.block_chunks import BlockChunks, KnownRows
from kvpage.store.load.block_load import BlockLoad, OnVerified
from kvpage.store.load.device.device_lanes import LanePool
from kvpage.store.records.keys import checked_tokens
from kvpage.store.records.kinds import KnownDtype, RecordKind, RecordKinds
from kvpage.store.records.record_io import ShapedSource, Source, read_shape
from kvpage.store.stack.call_gate import CallGate, gated
from kvpage.store.stack.chunk_threads import num_leading
from kvpage.store.stack.tier_stack import TierStack
from kvpage.store.tiers.tier import Key, Reader

if TYPE_CHECKING:
    from kvpage.cache.layer_slice import LayerCaches

Array = npt.NDArray[np.int32]
Table = npt.ArrayLike | torch.Tensor


class Pin:
    """Chunks that stay until `release`; a context manager that releases.

    Args:
        num_tokens: the number of leading tokens whose chunks are kept.
        readers: an open reader of each chunk. The pin owns and closes them.
    """

    def __init__(self, num_tokens: int, readers: Sequence[Reader]) -> None:
        self.num_tokens = num_tokens
        self._readers = list(readers)

    @uninterrupted
    def release(self) -> None:
        """Let the chunks be evicted again. A second call does nothing."""
        for reader in self._readers:
            reader.close()
        self._readers = []

    def __enter__(self) -> "Pin":
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self.release()
        finally:  # Ctrl-C may have come before it began
            self.release()


class LayerChunks:
    """The chunks of one cache's layers. Thread-safe; made by `KVStore.layers`, and open as long as the store.

    Records name the layers, and the scales and the layout of the cache's rows. A cache of other layers finds none.
    Counters of the store count the tokens of each cache.

    Calls take `tokens`, int [num_tokens]; tokens after the last whole chunk make a shorter chunk. Tokens of different
    namespaces never meet. `block_table`, int [num_blocks], names the tokens' blocks in their order. Wrong arguments
    raise ValueError or TypeError, and so do blocks that are too few or missing.

    Args:
        tiers: Of the store.
        gate: Of the store.
        dtype: Of the K and V, with the metadata and the codec of the records.
        engine: The cache; None for a store's own view, whose calls name one.

    Attributes:
        chunk_size: Tokens of a chunk.
        layer_ids: The layers, as the whole model counts them.
    """

    def __init__(
        self, tiers: TierStack, gate: CallGate, dtype: KnownDtype, engine: "LayerCaches | None" = None
    ) -> None:
        self.gate, self.chunk_size = gate, dtype.chunk_size
        self.layer_ids = () if engine is None else tuple(engine.layer_ids)
        self._tiers, self._dtype, self._engine = tiers, dtype, engine
        self._rows, self._lanes = KnownRows(), LanePool()
        self._layer_lanes = LanePool()  # of their own: their borrower may wait for the others meanwhile

    @gated
    def there(self, tokens: Tokens, namespace: bytes = b"") -> list[bool]:
        """Return for each chunk of `tokens` in a `namespace` whether it is there, or was a moment ago."""
        return self.flags(checked_tokens(tokens, namespace), namespace)

    @gated
    def put(
        self,
        tokens: Tokens,
        block_table: Table,
        first_chunk: int = 0,
        namespace: bytes = b"",
        skip_existing: bool = True,
    ) -> None:
        """Store the chunks of `tokens` in a `namespace`.

        Args:
            block_table: blocks before the first chunk may be any.
            first_chunk: the first chunk to store.
            skip_existing: leave chunks alone that are there. Otherwise they are replaced.

        Raises:
            ValueError: there is no such chunk.
        """
        check_flag("skip_existing", skip_existing)
        array, first = checked_tokens(tokens, namespace), as_integer("first_chunk", first_chunk)
        if not 0 <= first * self.chunk_size <= len(array):
            raise ValueError(f"first_chunk must be in [0, {len(array) // self.chunk_size}], got {first}")
        self.put_blocks(array, self._cache, block_table, first * self.chunk_size, namespace, skip_existing)

    @gated
    def load(self, tokens: Tokens, block_table: Table, start: int = 0, namespace: bytes = b"") -> int:
        """Load K and V of tokens[start:] in a `namespace` into blocks of the `block_table`, as far as chunks and blocks
        reach.

        Blocks before `start` are not written; none may be named twice among the others.

        Returns:
            The token after the last one that is in the blocks; `start` if none was found. Blocks after it may have been
            written, and mean nothing.
        """
        return self.load_blocks(checked_tokens(tokens, namespace), self._cache, block_table, start, namespace)

    @gated
    def prefetch(self, tokens: Tokens, namespace: bytes = b"") -> int:
        """Copy the chunks of `tokens` in a `namespace` into the faster tiers; see KVStore.prefetch.

        Returns:
            The number of leading tokens that are in the fastest tier that can have them.
        """
        array = checked_tokens(tokens, namespace)
        return self._num_tokens(num_leading(self._tiers.promote(self.keys(array, namespace))), array)

    @gated
    def remove(self, tokens: Tokens, namespace: bytes = b"") -> int:
        """Remove the chunks of `tokens` in a `namespace`, of these layers alone, from every tier.

        Returns:
            The number of chunks removed from the tier that had most of them.
        """
        return self._tiers.remove(self._dtype.keys(checked_tokens(tokens, namespace), namespace))

    # --- for the store, which has passed its gate and checked the tokens ----------------------------------------------

    def keys(self, tokens: Array, namespace: bytes) -> list[Key]:
        """Return the keys of the chunks of `tokens` in a `namespace`; none while no dtype is known or found."""
        kinds = self.find_kinds(tokens, namespace)
        return [] if kinds is None else kinds.keys.of(tokens, namespace)

    def find_kinds(self, tokens: Array, namespace: bytes) -> RecordKinds | None:
        """Return the known kinds, or the first right record's of `tokens` in a `namespace`; None for neither."""
        if self._dtype.kinds is not None or not len(tokens):
            return self._dtype.kinds
        first, sought = tokens[: self.chunk_size], self._dtype.sought
        keys = [kinds.keys.of(first, namespace)[0] for _, kinds in sought]
        for (dtype, kinds), key, tier in zip(sought, keys, self._tiers.locate(keys), strict=True):
            read = partial(read_shape, kinds=kinds, namespace=namespace)
            if tier is not None and self._tiers.first(key, read) is not None:
                with suppress(ValueError):  # another thread was first
                    self._dtype.settle(dtype)
                break
        return self._dtype.kinds

    def flags(self, tokens: Array, namespace: bytes) -> list[bool]:
        """Return for each chunk of `tokens` in a `namespace` whether it is in a tier."""
        return [tier is not None for tier in self._tiers.locate(self.keys(tokens, namespace))]

    def count(self, tokens: Array, namespace: bytes) -> int:
        """Return the number of leading `tokens` of a `namespace` whose chunks are in a tier."""
        return self.count_of(self.keys(tokens, namespace), tokens)

    def count_of(self, keys: Sequence[Key], tokens: Array) -> int:
        """Return the number of leading `tokens` whose chunks, of these `keys`, are in a tier."""
        located = self._tiers.locate(keys)
        return self._num_tokens(located.index(None) if None in located else len(located), tokens)

    def reach(self, tokens: Array, namespace: bytes) -> GroupReach:
        """Return how far chunks reach into `tokens` of a `namespace`, and why not further.

        Hashes name chunks. So nothing tells which token differs from another prompt's, nor of other namespaces.
        """
        there = self.flags(tokens, namespace)
        num_whole = num_leading(there)
        reach = GroupReach("attention", self._num_tokens(num_whole, tokens), Ending.NOT_CACHED)
        if num_whole == len(there):
            return replace(reach, ending=Ending.PROMPT)
        if True in there[num_whole:]:
            return replace(reach, ending=Ending.GAP, above=there.index(True, num_whole) * self.chunk_size)
        return reach

    def pin(self, tokens: Array, namespace: bytes) -> Pin:
        """Return a pin of the leading chunks of `tokens` in a `namespace`."""
        readers = [reader for _, reader in self._tiers.open_leading(self.keys(tokens, namespace))]
        return Pin(self._num_tokens(len(readers), tokens), readers)

    def put_chunks(
        self,
        kinds: RecordKinds,
        tokens: Array,
        start: int,
        chunk: Callable[[int, int], ShapedSource],
        skip_existing: bool,
        namespace: bytes,
    ) -> tuple[list[Key], int]:
        """Put the chunks of tokens[start:] in a `namespace` into the tiers, with `skip_existing` as in `put`.

        Args:
            kinds: of the records.
            tokens: of which a chunk begins at `start`.
            start: the first token.
            chunk: chunk(begin, end) returns the chunk of these tokens.

        Returns:
            The keys of the chunks, and the number that were new to a tier.
        """
        size = self.chunk_size
        keys = kinds.keys.of(tokens, namespace)[start // size :]

        def record(index: int) -> tuple[RecordKind, Source]:
            begin = start + index * size
            made = chunk(begin, min(begin + size, len(tokens)))
            return kinds.of(keys[index], made.shape, namespace), made

        num_new = self._tiers.put(keys, record, skip_existing).num_new
        self._tiers.count(stored_chunks=num_new)
        return keys, num_new

    def put_blocks(
        self, tokens: Array, engine: "LayerCaches", table: Table, start: int, namespace: bytes, skip_existing: bool
    ) -> list[Key]:
        """Put the chunks of `tokens` from `start` on, as `put_chunks` does, out of an engine's blocks.

        Args:
            engine: the cache of the blocks.
            table: the tokens' blocks in their order.
            namespace: as of `put_chunks`. So is skip_existing.

        Returns:
            The keys of the chunks.
        """
        blocks = self.blocks(engine, table)
        blocks.check_room(len(tokens))
        kinds = self._dtype.settle(blocks.rows.dtype)
        return self.put_chunks(kinds, tokens, start, blocks.chunk, skip_existing, namespace)[0]

    def blocks(self, engine: "LayerCaches", table: Table) -> BlockChunks:
        """Return the blocks of an `engine` in a `table` as chunks.

        Raises:
            ValueError: the engine does not match the store's metadata or codec.
        """
        rows, lanes = self._rows.of(engine), (self._lanes, self._layer_lanes)
        blocks = BlockChunks(engine, table, self._dtype.metadata, rows, *lanes)
        if self._dtype.codec == "fp8" and len(blocks.units) > 1:
            raise ValueError("codec must be 'raw' or 'zstd' for layers of unlike heads or sizes, got 'fp8'")
        return blocks

    def begin_load(self, tokens: Array, engine: "LayerCaches", table: Table, start: int, namespace: bytes) -> BlockLoad:
        """Return a load, not begun, of tokens[start:] in a `namespace` into blocks of an `engine` in a `table`."""
        start = as_integer("start", start)
        blocks = self.blocks(engine, table)
        kinds = self._dtype.of(blocks.rows.dtype)
        load = BlockLoad(self._tiers, blocks, kinds, kinds.keys.of(tokens, namespace), len(tokens), start, namespace)
        if self._dtype.kinds is None:  # checked first, then changed
            self._dtype.settle(blocks.rows.dtype)
        self._tiers.count(query_tokens=load.end - start)
        return load

    def load_blocks(
        self,
        tokens: Array,
        engine: "LayerCaches",
        table: Table,
        start: int,
        namespace: bytes,
        verified: OnVerified | None = None,
    ) -> int:
        """Return the token after the last one that a load has brought.

        Args:
            tokens: as of `begin_load`. So are engine, table, start and namespace.
            verified: as of `BlockStore.load_early`; None for a load that tells nothing early.
        """
        load = self.begin_load(tokens, engine, table, start, namespace)
        end = load.end_of(load.run(verified))
        self._tiers.count(hit_tokens=end - load.start)
        return end

    # --- inside -------------------------------------------------------------------------------------------------------

    @property
    def _cache(self) -> "LayerCaches":
        assert self._engine is not None, "a store's own view has no cache: its calls name one"
        return self._engine

    def _num_tokens(self, num_chunks: int, tokens: Array) -> int:
        return min(num_chunks * self.chunk_size, len(tokens))

"""LayerChunks: K and V of some of a model's layers, as chunks of their own beside those of other layers.

    layers   0 1 3 4     | chunk 0 | chunk 1 | chunk 2 | chunk 3 |       full layers: all of them
    layers   2 5         |    .    |    .    | chunk 2 | chunk 3 |       a window: what it still had

Each chunk is found by its tokens and all before them, whether the chunks before it are there or not.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvpage.checks.tokens import Tokens, as_tokens
from kvpage.checks.values import as_integer, check_at_least, check_flag, check_namespace
from kvpage.store.load.block_chunks import metadata_of
from kvpage.store.load.chunk_access import ChunkAccess
from kvpage.store.load.known_dtype import KnownDtype
from kvpage.store.records.keys import KVStoreMetadata
from kvpage.store.stack.call_gate import gated
from kvpage.store.states.state_parts import StateParts

if TYPE_CHECKING:
    from kvpage.cache.layer_slice import LayerCaches


class LayerChunks:
    """The chunks of one cache's layers. Thread-safe; made by `KVStore.layers`, and open as long as the store.

    Records name the layers, and the scales and the layout of the cache's rows. A cache of other layers finds none.
    Counters of the store count the tokens of each cache.

    Args:
        parts: Of the store.
        metadata: Of the store.
        chunk_size: Tokens of a chunk.
        codec: Of the store.
        engine: The cache.

    Attributes:
        chunk_size: Tokens of a chunk.
        layer_ids: The layers, as the whole model counts them.

    Raises:
        TypeError: `engine` is no CacheEngine and no LayerSlice.
        ValueError: It has no layers, or another dtype than the store. Or `chunk_size` is not positive.
    """

    def __init__(
        self,
        parts: StateParts,
        metadata: KVStoreMetadata,
        chunk_size: int,
        codec: str,
        engine: "LayerCaches",
    ) -> None:
        chunk_size = as_integer("chunk_size", chunk_size)
        check_at_least("chunk_size", chunk_size, 1)
        own = metadata_of(engine, metadata.model_name, metadata.world_size, metadata.worker_id, metadata.fmt)
        if own.kv_dtype is None:
            raise ValueError("engine must have layers, got none")
        if metadata.kv_dtype not in (None, own.kv_dtype):
            raise ValueError(f"kv_dtype of the store must be the engine's, {own.kv_dtype}, got {metadata.kv_dtype}")
        layers = "layers", ",".join(map(str, engine.layer_ids))
        own = replace(own, extra=(*metadata.extra, layers))
        self.gate, self.chunk_size, self.layer_ids = parts.gate, chunk_size, tuple(engine.layer_ids)
        self._engine, self._tiers = engine, parts.tiers
        self._dtype = KnownDtype(own, chunk_size, codec)
        self._chunks = ChunkAccess(chunk_size, self._dtype, parts.tiers)

    @gated
    def there(self, tokens: Tokens, namespace: bytes = b"") -> list[bool]:
        """Return for each chunk of the tokens whether it is there, or was a moment ago.

        Args:
            tokens: int [num_tokens]. Those after the last whole chunk are a shorter one.
            namespace: tokens of different namespaces never meet.

        Returns:
            A flag for each chunk.

        Raises:
            ValueError, TypeError: arguments are wrong.
        """
        return self._chunks.there(_checked(tokens, namespace), namespace)

    @gated
    def put(
        self,
        tokens: Tokens,
        block_table: npt.ArrayLike,
        first_chunk: int = 0,
        namespace: bytes = b"",
        skip_existing: bool = True,
    ) -> None:
        """Store the chunks of the tokens from one on.

        Args:
            tokens: int [num_tokens].
            block_table: int [num_blocks], the tokens' blocks in their order. Those before the first chunk may be any.
            first_chunk: the first chunk to store.
            namespace: as in `there`.
            skip_existing: leave chunks alone that are there. Otherwise they are replaced.

        Raises:
            ValueError, TypeError: arguments are wrong, or the blocks are too few or missing.
        """
        check_flag("skip_existing", skip_existing)
        array, first = _checked(tokens, namespace), as_integer("first_chunk", first_chunk)
        if not 0 <= first * self.chunk_size <= len(array):
            raise ValueError(f"first_chunk must be in [0, {len(array) // self.chunk_size}], got {first}")
        blocks = self._chunks.blocks(self._engine, block_table)
        blocks.check_room(len(array))
        kinds = self._dtype.settle(self._engine.layout.dtype)
        self._chunks.put(kinds, array, first * self.chunk_size, blocks.chunk, skip_existing, namespace)

    @gated
    def load(self, tokens: Tokens, block_table: npt.ArrayLike, start: int = 0, namespace: bytes = b"") -> int:
        """Load K and V of tokens[start:], as far as their chunks are there and the blocks reach.

        Args:
            tokens: int [num_tokens].
            block_table: int [num_blocks], the tokens' blocks in their order. Those before `start` are not written.
            start: the first token to load.
            namespace: as in `there`.

        Returns:
            The token after the last one that is in the blocks; `start` if none was found. Blocks after it may have been
            written, and mean nothing.

        Raises:
            ValueError, TypeError: arguments are wrong, or a block is missing or named twice.
        """
        load = self._chunks.load(_checked(tokens, namespace), self._engine, block_table, start, namespace)
        end = load.end_of(self._tiers.read(load.keys, load.read))
        self._tiers.count(hit_tokens=end - load.start)
        return end

    @gated
    def prefetch(self, tokens: Tokens, namespace: bytes = b"") -> int:
        """Copy the chunks that are there into the faster tiers; see KVStore.prefetch.

        Args:
            tokens: int [num_tokens].
            namespace: as in `there`.

        Returns:
            The number of leading tokens that are in the fastest tier that can have them.

        Raises:
            ValueError, TypeError: arguments are wrong.
        """
        return self._chunks.promote(_checked(tokens, namespace), namespace)

    @gated
    def remove(self, tokens: Tokens, namespace: bytes = b"") -> int:
        """Remove the tokens' chunks of these layers from every tier.

        Args:
            tokens: int [num_tokens].
            namespace: as in `there`.

        Returns:
            The number of chunks removed from the tier that had most of them.

        Raises:
            ValueError, TypeError: arguments are wrong.
        """
        return self._tiers.remove(self._dtype.keys(_checked(tokens, namespace), namespace))


def _checked(tokens: Tokens, namespace: bytes) -> npt.NDArray[np.int32]:
    check_namespace(namespace)
    return as_tokens(tokens)

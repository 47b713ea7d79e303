"""LayerwiseStore: chunks in records of a few layers each: the first layers are stored while the others are computed.

    prefill worker   layers 0 to 3 ─► store ┐  layers 4 to 7 ─► store ┐  the step ends well ─► the last layers
    decode worker                           └─► load                  └─► load                  └─► load, commit

A chunk is there when all its records are. The last layers are stored once the step has ended well. So a step that fails
leaves nothing that anybody uses.
"""

from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from kvpage.cache.layer_slice import LayerCaches, LayerSlice
from kvpage.checks.tokens import Tokens, as_tokens
from kvpage.checks.values import as_integer, check_at_least, check_namespace, runs_of
from kvpage.store.config import KVStoreConfig
from kvpage.store.states.layer_chunks import LayerChunks

if TYPE_CHECKING:
    from kvpage.cache.cache_engine import CacheEngine


class LayersStore(Protocol):
    """What a LayerwiseStore needs of its store; a KVStore is one."""

    @property
    def config(self) -> KVStoreConfig:
        """The configuration of the store."""

    def layers(self, engine: LayerCaches, chunk_size: int | None = None) -> LayerChunks:
        """Return the chunks of a cache's layers.

        Args:
            engine: The cache of some layers.
            chunk_size: Tokens of a chunk; None for the store's.
        """


class LayerwiseStore:
    """The chunks of one engine in a KVStore, a few layers a record. Thread-safe, and open as long as the KVStore.

    Give it to `Engine.use_store`, or to an ArrivingStore. With `EngineConfig(save_portions=True)` an engine stores
    layers while it computes the next ones. Records name their layers: workers find each other's with the same
    `num_layers` only, and those of a plain KVStore never.

    Args:
        store: A KVStore. It stays its owner's to close.
        engine: The cache whose blocks are stored and loaded.
        num_layers: Layers of a record. The last record of a chunk may have fewer.

    Attributes:
        store: As given.
        groups: The chunks of each few layers, in the model's order.

    Raises:
        TypeError: `store` is no KVStore, or `engine` no CacheEngine.
        ValueError: The engine has no layers, or another dtype than the store. Or `num_layers` is not positive.
    """

    def __init__(self, store: LayersStore, engine: "CacheEngine", num_layers: int = 4) -> None:
        if not hasattr(store, "layers"):
            raise TypeError(f"store must be a KVStore, got {type(store).__name__}")
        if not hasattr(engine, "bound_layers"):
            raise TypeError(f"engine must be a CacheEngine, got {type(engine).__name__}")
        each, total = as_integer("num_layers", num_layers), len(engine.gpu_cache)
        check_at_least("num_layers", each, 1)
        if not total:
            raise ValueError("engine must have layers, got none")
        slices = [LayerSlice(engine, first, min(first + each, total)) for first in range(0, total, each)]
        self.store, self.groups = store, tuple(store.layers(one) for one in slices)
        self._engine = engine

    @property
    def config(self) -> KVStoreConfig:
        """The configuration of the store."""
        return self.store.config

    def lookup(self, tokens: Tokens, *, namespace: bytes = b"") -> int:
        """Return the number of leading tokens of which all layers are there, or were a moment ago.

        Args:
            tokens: int [num_tokens].
            namespace: The one that they are stored in.

        Raises:
            ValueError, TypeError: As for `KVStore.lookup`.
        """
        array = _checked(tokens, namespace)
        for group in reversed(self.groups):  # what is under way lacks the last one
            there = group.there(array, namespace)
            if False in there:
                array = array[: there.index(False) * group.chunk_size]
        return len(array)

    def load_blocks(
        self,
        tokens: Tokens,
        engine: "CacheEngine",
        block_table: npt.NDArray[np.int32],
        *,
        start: int = 0,
        namespace: bytes = b"",
    ) -> int:
        """Load K and V of tokens[start:], as far as all layers are there and the blocks reach.

        Args:
            tokens: int [num_tokens].
            engine: The engine that the store was made with.
            block_table: int [num_blocks], the tokens' blocks in their order.
            start: The first token to load.
            namespace: The one that they are stored in.

        Returns:
            The token after the last one that is in the blocks; `start` if none was found. Blocks after it may have been
            written, and mean nothing.

        Raises:
            ValueError, TypeError: As for `KVStore.load_blocks`, or it is another engine.
        """
        self.check_engine(engine)
        array, end = _checked(tokens, namespace), len(tokens)
        for group in self.groups:
            whole = array[: -(-end // group.chunk_size) * group.chunk_size]
            end = min(end, group.load(whole, block_table, start, namespace))
        return end

    def store_blocks(
        self, tokens: Tokens, engine: "CacheEngine", block_table: npt.NDArray[np.int32], *, namespace: bytes = b""
    ) -> int:
        """Store K and V of the tokens, as far as they are not there yet.

        First layers without last ones are replaced: a step may have failed after it had stored them.

        Args:
            tokens: int [num_tokens].
            engine: The engine that the store was made with.
            block_table: int [num_blocks], the tokens' blocks in their order.
            namespace: Tokens of different namespaces never meet.

        Returns:
            The number of leading tokens that the store has now.

        Raises:
            ValueError, TypeError: As for `KVStore.store_blocks`, or it is another engine.
        """
        array = _checked(tokens, namespace)
        self.finish_blocks(array, engine, block_table, namespace=namespace)
        for group in self.groups[:-1]:  # which may have lost some
            group.put(array, block_table, 0, namespace)
        return self.lookup(array, namespace=namespace)

    def finish_blocks(
        self,
        tokens: Tokens,
        engine: "CacheEngine",
        block_table: npt.NDArray[np.int32],
        *,
        namespace: bytes = b"",
        has_first: npt.NDArray[np.bool_] | None = None,
    ) -> int:
        """Store chunks whose last layers are not there, and leave the others alone.

        Args:
            tokens: int [num_tokens].
            engine: The engine that the store was made with.
            block_table: int [num_blocks], the tokens' blocks in their order.
            namespace: Tokens of different namespaces never meet.
            has_first: bool [num_chunks], the chunks of which the caller has stored all but the last layers just now;
                None for none. First layers of others are replaced.

        Returns:
            The number of tokens.

        Raises:
            ValueError, TypeError: As for `store_blocks`.
        """
        self.check_engine(engine)
        array, (*first_groups, last) = _checked(tokens, namespace), self.groups
        lacks = ~np.array(last.there(array, namespace), bool)
        replaced = lacks if has_first is None else lacks & ~has_first
        for begin, end in runs_of(replaced):
            for group in first_groups:
                group.put(array[: end * group.chunk_size], block_table, begin, namespace, skip_existing=False)
        for begin, end in runs_of(lacks):
            last.put(array[: end * last.chunk_size], block_table, begin, namespace)
        return len(array)

    def remove(self, tokens: Tokens, *, namespace: bytes = b"") -> int:
        """Remove the tokens' chunks from every tier.

        Args:
            tokens: int [num_tokens].
            namespace: The one that they are stored in.

        Returns:
            The number of chunks of which at least some layers were removed.

        Raises:
            ValueError, TypeError: As for `KVStore.remove`.
        """
        array = _checked(tokens, namespace)
        return max(group.remove(array, namespace) for group in reversed(self.groups))

    def check_engine(self, engine: "CacheEngine") -> None:
        """Check that the store was made with this engine.

        Args:
            engine: The engine of some blocks.

        Raises:
            ValueError: It was made with another.
        """
        if engine is not self._engine:
            raise ValueError("engine must be the one that the LayerwiseStore was made with, got another")


def _checked(tokens: Tokens, namespace: bytes) -> npt.NDArray[np.int32]:
    check_namespace(namespace)
    return as_tokens(tokens)

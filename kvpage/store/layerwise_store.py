"""LayerwiseStore: chunks in records of a few layers each: the first layers are stored while the others are computed.

    prefill worker   layers 0 to 3 ─► store ┐  layers 4 to 7 ─► store ┐  the step ends well ─► the last layers
    decode worker                           └─► load                  └─► load                  └─► load, commit

A chunk is there when all its records are. The last layers are stored once the step has ended well. So a step that fails
leaves nothing that anybody uses.
"""

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvpage.cache.layer_slice import LayerSlice
from kvpage.checks.tokens import Tokens
from kvpage.checks.values import as_integer, check_at_least, runs_of
from kvpage.store.block_store import BlockStore, Table, check_store
from kvpage.store.records.keys import KVStoreMetadata, checked_tokens

if TYPE_CHECKING:
    from kvpage.cache.cache_engine import CacheEngine


class LayerwiseStore(BlockStore):
    """The chunks of one engine in a KVStore, a few layers a record. Thread-safe, and open as long as the KVStore.

    Give it to `Engine.use_store`, or to an ArrivingStore. With `EngineConfig(save_portions=True)` an engine stores
    layers while it computes the next ones. Records name their layers: workers find each other's with the same
    `num_layers` only, and a plain KVStore's records never.

    Args:
        store: A KVStore. It stays its owner's to close.
        engine: The cache whose blocks are stored and loaded.
        num_layers: Layers of a record. The last record of a chunk may have fewer.

    Attributes:
        store: As given.
        groups: The chunks of each few layers, in the model's order.

    Raises:
        TypeError: `store` is no BlockStore, or `engine` no CacheEngine.
        ValueError: The engine has no layers, or another dtype than the store. Or `num_layers` is not positive.
    """

    def __init__(self, store: BlockStore, engine: "CacheEngine", num_layers: int = 4) -> None:
        check_store(store)
        if not hasattr(engine, "bound_layers"):
            raise TypeError(f"engine must be a CacheEngine, got {type(engine).__name__}")
        step, total = as_integer("num_layers", num_layers), len(engine.gpu_cache)
        check_at_least("num_layers", step, 1)
        if not total:
            raise ValueError("engine must have layers, got none")
        slices = [LayerSlice(engine, first, min(first + step, total)) for first in range(0, total, step)]
        self.store, self.config, self._engine = store, store.config, engine
        self.groups = tuple(map(store.layers, slices))

    @property
    def metadata(self) -> KVStoreMetadata | None:
        return self.store.metadata

    def lookup(self, tokens: Tokens, *, namespace: bytes = b"") -> int:
        array = checked_tokens(tokens, namespace)
        for group in reversed(self.groups):  # a chunk under way lacks the last group
            there = group.there(array, namespace)
            if False in there:
                array = array[: there.index(False) * group.chunk_size]
        return len(array)

    def load_blocks(
        self, tokens: Tokens, engine: "CacheEngine", block_table: Table, *, start: int = 0, namespace: bytes = b""
    ) -> int:
        self.check_engine(engine)
        array, end = checked_tokens(tokens, namespace), len(tokens)
        for group in self.groups:
            whole = array[: -(-end // group.chunk_size) * group.chunk_size]
            end = min(end, group.load(whole, block_table, start, namespace))
        return end

    def store_blocks(self, tokens: Tokens, engine: "CacheEngine", block_table: Table, *, namespace: bytes = b"") -> int:
        array = checked_tokens(tokens, namespace)
        self.finish_blocks(array, engine, block_table, namespace=namespace)  # a step may have left first layers alone
        for group in self.groups[:-1]:  # which may have lost some
            group.put(array, block_table, 0, namespace)
        return self.lookup(array, namespace=namespace)

    def finish_blocks(
        self,
        tokens: Tokens,
        engine: "CacheEngine",
        block_table: Table,
        *,
        namespace: bytes = b"",
        has_first: npt.NDArray[np.bool_] | None = None,
    ) -> int:
        self.check_engine(engine)
        array, (*first_groups, last) = checked_tokens(tokens, namespace), self.groups
        lacks = ~np.array(last.there(array, namespace), bool)
        replaced = lacks if has_first is None else lacks & ~has_first
        for begin, end in runs_of(replaced):
            for group in first_groups:
                group.put(array[: end * group.chunk_size], block_table, begin, namespace, skip_existing=False)
        for begin, end in runs_of(lacks):
            last.put(array[: end * last.chunk_size], block_table, begin, namespace)
        return len(array)

    def remove(self, tokens: Tokens, *, namespace: bytes = b"") -> int:
        """Remove the chunks of `tokens` in a `namespace` from every tier.

        Returns:
            The number of chunks of which at least some layers were removed.
        """
        array = checked_tokens(tokens, namespace)
        return max(group.remove(array, namespace) for group in reversed(self.groups))

    def check_engine(self, engine: "CacheEngine") -> None:
        if engine is not self._engine:
            raise ValueError("engine must be the one that the LayerwiseStore was made with, got another")

"""BlockStore: a store of K and V as an engine asks it. Three methods make a store, others tell what else it can do.

lookup ─► load_blocks                      every store
load_early, prefetch, explain           better answers; by default the methods above answer
layers, states                             for models with windows of their own, and with states; by default refused
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from kvpage.blocks.explain import Explanation
from kvpage.layout.groups import StateLayout
from kvpage.store.config import KVStoreConfig
from kvpage.store.load.block_load import OnVerified
from kvpage.store.load.layer_chunks import LayerChunks
from kvpage.store.records.keys import KVStoreMetadata
from kvpage.store.states.state_records import StateRecords

if TYPE_CHECKING:
    from kvpage.cache.cache_engine import CacheEngine
    from kvpage.cache.layer_slice import LayerCaches

TokenIds = npt.NDArray[np.int32]
Table = npt.NDArray[np.int32]


def check_store(store: object) -> None:
    """Raise TypeError unless it is a BlockStore."""
    if not isinstance(store, BlockStore):
        raise TypeError(f"store must derive from kvpage.store.BlockStore, got {type(store).__name__}")


def is_count(answer: object) -> bool:
    """Return whether a store's answer is a number of tokens."""
    return isinstance(answer, (int, np.integer)) and not isinstance(answer, bool) and bool(answer >= 0)


class BlockStore(ABC):
    """A store that an engine can ask; `KVStore` is one. Derive a store of your own from it. It calls no `__init__`.

    An engine calls the methods in threads of its own. None of them raises for trouble of the store's own: that is a
    miss. An exception that comes nevertheless is counted, and so is an answer that is no count. Both are misses, too.

    Calls take `tokens`, int32 [num_tokens], of a namespace: sequences of others are never found. `engine` is the cache
    of the blocks, `block_table`, int32, the blocks of the sequence from its first token on.

    Attributes:
        config: Tells the tokens of a chunk, and whether an engine stores generated tokens; None for the engine's own.
        waits_for_others: Whether loads wait for other workers: an engine gives each a thread of its own.
        groups: The chunks of each few layers, in the model's order; empty where records have all layers.
        has_layers: Whether `layers` gives chunks. An engine that is made with another store keeps one table, unless
            `num_window_blocks` is given.
    """

    config: KVStoreConfig | None = None
    waits_for_others: bool = False
    groups: Sequence[LayerChunks] = ()
    has_layers: bool = False

    @property
    def metadata(self) -> KVStoreMetadata | None:
        """The metadata of the records, by which ranks see whose heads they are; None if nothing tells."""
        return None

    @abstractmethod
    def lookup(self, tokens: TokenIds, *, namespace: bytes = b"") -> int:
        """Return how many leading `tokens` of a `namespace` are there, or were a moment ago."""

    @abstractmethod
    def load_blocks(
        self, tokens: TokenIds, engine: "CacheEngine", block_table: Table, *, start: int, namespace: bytes
    ) -> int:
        """Load K and V of tokens[start:] of a `namespace` into blocks, as far as they are there and the blocks reach.

        Args:
            engine: The cache of the blocks.
            block_table: The blocks of the tokens.

        Returns:
            The token after the last one that is in the blocks; `start` if none was found. Blocks after it may have been
            written, and mean nothing.
        """

    @abstractmethod
    def store_blocks(self, tokens: TokenIds, engine: "CacheEngine", block_table: Table, *, namespace: bytes) -> int:
        """Store K and V of `tokens` of a `namespace`, from the `block_table` of an `engine`; stored chunks may stay.

        Returns:
            How many leading tokens are there now.
        """

    def finish_blocks(
        self,
        tokens: TokenIds,
        engine: "CacheEngine",
        block_table: Table,
        *,
        namespace: bytes,
        has_first: npt.NDArray[np.bool_],
    ) -> int:
        """Store chunks whose last layers are not there, and leave the others alone. Asked of stores with `groups`.

        Args:
            tokens: As of `store_blocks`. So are engine, block_table and namespace.
            has_first: bool [num_chunks], the chunks of which the caller has stored all but the last layers just now.
                First layers of others are replaced.

        Returns:
            The number of tokens.
        """
        return self.store_blocks(tokens, engine, block_table, namespace=namespace)

    def load_early(
        self,
        tokens: TokenIds,
        engine: "CacheEngine",
        block_table: Table,
        verified: OnVerified,
        *,
        start: int,
        namespace: bytes,
    ) -> int:
        """Do as `load_blocks`, and tell on a GPU when all that it will load is verified, before the bytes are there.

        An engine on a GPU calls it in place of `load_blocks`. From `verified` on, a computation may use the blocks, if
        each of its layers waits for the arrival's. The blocks stay the caller's until the return.

        Args:
            tokens: As of `load_blocks`. So are engine, block_table, start and namespace.
            verified: Called in this thread, once at most, with the number that will be returned, and an `Arrival`. Not
                called where nothing is gained: a KVStore calls it for records in pinned memory, and never on a CPU.

        Returns:
            As of `load_blocks`, when all bytes are there. Fewer tokens than were verified, or an exception, say that
            the copies have failed.
        """
        return self.load_blocks(tokens, engine, block_table, start=start, namespace=namespace)

    def prefetch(self, tokens: TokenIds, *, namespace: bytes = b"") -> int:
        """Return how many leading `tokens` of a `namespace` are near now, brought nearer for a load soon."""
        return 0

    def explain(self, tokens: TokenIds, namespace: bytes = b"") -> Explanation:
        """Return how far the store reaches into `tokens`, at least one, of a `namespace`, and why not further.

        Of a KVStore, chunks alone: `states(...).explain` tells of states, too.
        """
        return Explanation(len(tokens), self.lookup(tokens, namespace=namespace), ())

    def check_engine(self, engine: "CacheEngine") -> None:  # noqa: B027
        """Raise ValueError unless blocks of the `engine` can be stored here: no save or load would work."""

    def layers(self, engine: "LayerCaches", chunk_size: int | None = None) -> LayerChunks:
        """Return the chunks of a cache's layers alone: no other call finds or removes them.

        Args:
            engine: The cache of some layers; a LayerSlice is one, too.
            chunk_size: Tokens of a chunk; None for the store's.

        Raises:
            TypeError: `engine` is no CacheEngine and no LayerSlice.
            ValueError: It has no layers, or another dtype than the store. `chunk_size` is not positive. Or the store
                does not keep groups of layers apart.
        """
        raise ValueError(
            "store must keep groups of layers apart with num_window_blocks, as a KVStore does, got "
            f"{type(self).__name__}: its chunks are of all layers"
        )

    def states(self, layout: StateLayout, kv_dtype: torch.dtype | None = None) -> StateRecords:
        """Return the records of states of one layout, each after an exact prefix.

        Args:
            layout: The place of each part in a state. States of another layout are never found.
            kv_dtype: Of the K and V of the same model; None for a model without any.

        Raises:
            TypeError: An argument is of another type.
            ValueError: The store is of another dtype, or keeps K and V alone. Or the metadata are too long.
        """
        raise ValueError(
            "store must keep states for a model whose layers have some, as a KVStore does, got "
            f"{type(self).__name__}: its chunks hold K and V alone"
        )

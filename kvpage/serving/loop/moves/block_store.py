"""BlockStore: what an engine needs of a store. LayeredStore: what it uses besides, where a store has it."""

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvpage.cache.cache_engine import CacheEngine
from kvpage.cache.layered_moves import Arrival

TokenIds = npt.NDArray[np.int32]


class BlockStore(Protocol):
    """A store that an engine can ask; `kvpage.store.KVStore` is one. Its methods are called in other threads.

    None of them raises for trouble of the store's own: that is a miss. An exception that comes nevertheless is counted,
    and so is an answer that is no count. Both are misses, too.
    """

    def lookup(self, tokens: TokenIds, *, namespace: bytes = b"") -> int:
        """Look a prompt up.

        Args:
            tokens: int32 [num_tokens].
            namespace: Only sequences of the same namespace are found.

        Returns:
            How many leading tokens it holds.
        """

    def load_blocks(
        self, tokens: TokenIds, engine: CacheEngine, block_table: npt.NDArray[np.int32], *, start: int, namespace: bytes
    ) -> int:
        """Load K and V of tokens[start:] into the blocks, as far as they are held and the blocks reach.

        Args:
            tokens: int32 [num_tokens].
            engine: The cache of the blocks.
            block_table: int32, the blocks of the sequence from its first token on.
            start: The first token that is loaded.
            namespace: As for `lookup`.

        Returns:
            The number of leading tokens whose K and V are there now.
        """

    def store_blocks(
        self, tokens: TokenIds, engine: CacheEngine, block_table: npt.NDArray[np.int32], *, namespace: bytes
    ) -> int:
        """Keep K and V of the tokens.

        Args:
            tokens: int32 [num_tokens].
            engine: The cache of the blocks.
            block_table: int32, the blocks of the sequence from its first token on.
            namespace: As for `lookup`.

        Returns:
            How many leading tokens it holds now.
        """


class LayeredStore(Protocol):
    """A BlockStore that may have one method more, which an engine on a GPU calls in place of `load_blocks`."""

    def load_by_layer(
        self,
        tokens: TokenIds,
        engine: CacheEngine,
        block_table: npt.NDArray[np.int32],
        verified: Callable[[int, Arrival], object],
        *,
        start: int,
        namespace: bytes,
    ) -> int:
        """Do as `load_blocks`, and tell what is verified before its bytes are there. Return when they are.

        Args:
            tokens: As of `load_blocks`. So are engine, block_table, start and namespace.
            verified: Called in this thread, once at most, with the number that will be returned, and the arrival of
                its layers.

        Returns:
            As of `load_blocks`. Fewer tokens than were verified, or an exception, say that the copies have failed.
        """


def is_count(count: object) -> bool:
    """Return whether it is a number of tokens."""
    return isinstance(count, (int, np.integer)) and not isinstance(count, bool) and bool(count >= 0)


def check_engine(store: BlockStore, engine: CacheEngine) -> None:
    """Raise ValueError if the store takes other engines only, as a LayerwiseStore may."""
    check = getattr(store, "check_engine", None)
    if check is not None:
        check(engine)

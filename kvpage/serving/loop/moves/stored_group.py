"""StoredGroup: a kind of cache between an engine's blocks and its store. It knows blocks and slots, and no queues.

a load    num_cached, lookup ─► num_wanted ─► begin_load ─► Loading.run ─► num_usable ─► commit ─► keep_end
          engine   thread       engine        engine        thread         engine

a save    hold ─► Hold.store ─► Hold.release
          engine  thread        engine
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from kvpage.blocks.explain import Explanation
from kvpage.blocks.sequence_state import Allocation, Ids
from kvpage.serving.loop.moves.store_load import StoreLoad
from kvpage.store.block_store import TokenIds


class Loading(NamedTuple):
    """A load that is ready to run. start: its first token. run: loads in a thread; returns the token after the last."""

    start: int
    run: Callable[[], int]


class Hold(NamedTuple):
    """Blocks of a prompt that stay where they are while a thread stores them.

    num_tokens: the leading tokens to store. block_ids: theirs. store: called in the thread with these tokens and their
    namespace; returns how many the store has now. release: lets go of the blocks, in the engine's thread.
    """

    num_tokens: int
    block_ids: Ids
    store: Callable[[TokenIds, bytes], int]
    release: Callable[[], object]


class StoredGroup(ABC):
    """The caches of one engine, of one kind. block_size: in tokens. device: of the blocks.

    `lookup`, `explain` and `prefetch` are called in threads, the others by the engine's.
    """

    block_size: int
    device: torch.device

    @abstractmethod
    def lookup(self, tokens: TokenIds, namespace: bytes) -> int:
        """Return how many leading tokens the store has."""

    @abstractmethod
    def explain(self, tokens: TokenIds, namespace: bytes) -> Explanation:
        """Return how far the store reaches into a prompt."""

    @abstractmethod
    def prefetch(self, tokens: TokenIds, namespace: bytes) -> object:
        """Bring what the store has of these tokens nearer within the store."""

    @abstractmethod
    def num_cached(self, tokens: TokenIds, namespace: bytes) -> int:
        """Return how many tokens a request would find cached."""

    def num_seen(self, tokens: TokenIds, namespace: bytes) -> int:
        """Return what `num_cached` does; nothing counts as used."""
        return self.num_cached(tokens, namespace)

    def num_wanted(self, tokens: TokenIds, num_found: int) -> int:
        """Return how many of the tokens that the store has are to be loaded: by default whole blocks."""
        return min(num_found, len(tokens) - 1) // self.block_size * self.block_size

    @abstractmethod
    def begin_load(self, load: StoreLoad[Any], num_tokens: int, allocation: Allocation) -> Loading:
        """Make blocks ready for a load of the tokens. Raise OutOfBlocks where there is no room beside them."""

    def num_usable(self, load: StoreLoad[Any], num_loaded: int) -> int:
        """Return how many of the tokens that have come can be committed: by default whole blocks."""
        return num_loaded // self.block_size * self.block_size

    def keep_end(self, load: StoreLoad[Any]) -> None:  # noqa: B027
        """Let others go on after the tokens that were committed, where that takes more than their blocks."""

    @abstractmethod
    def hold(self, tokens: TokenIds, namespace: bytes) -> Hold | None:
        """Hold what is cached of committed tokens on the device; None for nothing."""

"""StateStoreConnector: StoreConnector for a model with states, whose prompts go on at exact positions.

    a request waits ─► the longest position with K, V and a state ─► blocks and a slot ─► load both
    all is there    ─► commit, and the slot becomes a checkpoint: the request, admitted now, begins there
    its prefill is done, or it has ended ─► hold the checkpoints on its way ─► store ─► let go

A load that lacks anything is one to a shorter position. Where there is none, its blocks and its slot are freed, and the
request computes.
"""

import time
from concurrent.futures import Future
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpage.blocks.explain import GroupReach
from kvpage.blocks.hybrid.manager import HybridManager
from kvpage.blocks.load_or_compute import LoadOrCompute
from kvpage.blocks.states import Allocation
from kvpage.cache.cache_engine import CacheEngine
from kvpage.cache.side_stream import side_stream
from kvpage.cache.state_cache import StateCache
from kvpage.serving.loop.moves.block_transfers import BlockTransfers
from kvpage.serving.loop.moves.loads.prefetches import Prefetch
from kvpage.serving.loop.moves.loads.prompt_loads import PromptLoad
from kvpage.serving.loop.moves.state_saves import StateSaves
from kvpage.serving.loop.moves.store_saves import Saves
from kvpage.serving.loop.moves.stored_states import StoredStates
from kvpage.serving.loop.store_connector import BlockStore, StoreConnector

TokenIds = npt.NDArray[np.int32]


class StateStoreConnector(StoreConnector):
    """Loads and stores for one engine. All methods are for the engine's thread.

    The rule compares a load, its state included, with computing: its speed is that of loads of so many blocks so far.

    Args:
        store: A BlockStore that is a StateStore, too.
        cache: The blocks.
        slots: The states.
        manager: Of both.
        transfers: The moves of blocks.
        rule: As of StoreConnector.
        settings: As of StoreConnector.
    """

    def __init__(
        self,
        store: BlockStore,
        cache: CacheEngine,
        slots: StateCache,
        manager: HybridManager,
        transfers: BlockTransfers,
        rule: LoadOrCompute | None,
        **settings: Any,
    ) -> None:
        self._hybrid, self._slots = manager, slots
        self._stored = StoredStates(store, cache, slots, self._make_moves)
        super().__init__(store, cache, manager, transfers, rule, **settings)

    def _make_saves(self) -> Saves:
        return StateSaves(self._stored, self._hybrid)

    def _make_moves(self) -> None:
        self._transfers.run()
        self._hybrid.do_state_moves(self._slots.do_move)

    @property
    def _prefetch_call(self) -> Prefetch:
        return self._stored.prefetch

    def _num_cached(self, load: PromptLoad) -> int:
        return self._hybrid.num_cached(load.tokens, load.namespace)

    def _lookup(self, tokens: TokenIds, namespace: bytes) -> int:
        return self._stored.lookup(tokens, namespace)

    def _look(self, tokens: TokenIds, namespace: bytes) -> tuple[int, tuple[GroupReach, ...]]:
        return self._stored.look(tokens, namespace)

    def _num_seen(self, tokens: TokenIds, namespace: bytes) -> int:
        return self._hybrid.num_cached(tokens, namespace)

    def _num_wanted(self, tokens: TokenIds, num_found: int) -> int:
        return min(num_found, len(tokens) - 1) if self._hybrid.keeps_checkpoints else 0

    def _into_blocks(self, load: PromptLoad, num_tokens: int, given: Allocation) -> "Future[int]":
        self._make_moves()
        tokens, start, slot = load.tokens[:num_tokens], given.num_cached_tokens, self._hybrid.slot_of(load)
        block_ids = given.block_ids[: -(-num_tokens // self._hybrid.block_size)]
        stream = side_stream(self._cache.device)

        def load_all() -> int:
            begin = time.perf_counter()
            with stream():
                end = self._stored.load(tokens, start, block_ids, slot, load.namespace)
            self._saw_load(max(end - start, 0), time.perf_counter() - begin)
            return end

        return self._loaders.submit(load_all)

    def _finish(self, load: PromptLoad, num_loaded: int) -> bool:
        """Commit the tokens that have come, and let others go on from the state after them."""
        if not load.num_cached < num_loaded <= load.num_wanted:
            return False
        self._commit(load, num_loaded)
        self._hybrid.keep_end(load, goes_on=True)
        return True

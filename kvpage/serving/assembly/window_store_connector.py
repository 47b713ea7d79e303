"""WindowStoreConnector: StoreConnector for a model whose windows have blocks of their own.

    a request waits ─► the longest position with K and V in all groups ─► blocks, and room for the last windows ─► load
    all is there    ─► commit: the request, admitted now, begins there
    its prefill is done, or it has ended ─► hold its blocks, and what windows still have ─► store ─► let go

A load that lacks anything is none: its blocks are freed, and the request computes.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpage.blocks.explain import GroupReach
from kvpage.blocks.groups.windowed_manager import WindowedManager
from kvpage.blocks.load_or_compute import LoadOrCompute
from kvpage.blocks.states import Allocation
from kvpage.cache.cache_engine import CacheEngine
from kvpage.cache.side_stream import side_stream
from kvpage.checks.errors import OutOfBlocks
from kvpage.serving.loop.moves.block_transfers import BlockTransfers
from kvpage.serving.loop.moves.loads.prefetches import Prefetch
from kvpage.serving.loop.moves.loads.prompt_loads import PromptLoad
from kvpage.serving.loop.moves.store_saves import Saves
from kvpage.serving.loop.moves.stored_windows import StoredWindows
from kvpage.serving.loop.moves.window_saves import WindowSaves
from kvpage.serving.loop.store_connector import BlockStore, StoreConnector

TokenIds = npt.NDArray[np.int32]


class WindowStoreConnector(StoreConnector):
    """Loads and stores for one engine. All methods are for the engine's thread.

    The rule compares a load, its windows included, with computing: its speed is that of loads of so many blocks so far.

    Args:
        store: A BlockStore that is a LayerStore, too.
        cache: The blocks of full layers.
        windows: Those of each window.
        manager: Of all of them.
        transfers: The moves of full layers' blocks.
        rule: As of StoreConnector.
        settings: As of StoreConnector.
    """

    def __init__(
        self,
        store: BlockStore,
        cache: CacheEngine,
        windows: Sequence[CacheEngine],
        manager: WindowedManager,
        transfers: BlockTransfers,
        rule: LoadOrCompute | None,
        **settings: Any,
    ) -> None:
        self._windowed, self._caches = manager, windows
        self._stored = StoredWindows(store, manager, cache, windows)
        super().__init__(store, cache, manager, transfers, rule, **settings)

    def _make_saves(self) -> Saves:
        return WindowSaves(self._stored, self._windowed)

    @property
    def _prefetch_call(self) -> Prefetch:
        return self._stored.prefetch

    def _num_cached(self, load: PromptLoad) -> int:
        return self._windowed.num_cached(load.tokens, load.namespace)

    def _num_seen(self, tokens: TokenIds, namespace: bytes) -> int:
        return self._windowed.num_cached(tokens, namespace)

    def _lookup(self, tokens: TokenIds, namespace: bytes) -> int:
        return self._stored.lookup(tokens, namespace)

    def _look(self, tokens: TokenIds, namespace: bytes) -> tuple[int, tuple[GroupReach, ...]]:
        return self._stored.look(tokens, namespace)

    def _into_blocks(self, load: PromptLoad, num_tokens: int, given: Allocation) -> "Future[int]":
        """Begin to load. Raise OutOfBlocks where windows have no room for the last tokens.

        Where there are other sequences, a quarter of each group is left to them: they would be preempted for this load.
        """
        has_others = self._windowed.stats().num_sequences > 1
        for blocks in self._windowed.windows if has_others else ():
            num_needed, num_left = blocks.num_needed(num_tokens), blocks.num_free - blocks.pool.num_blocks // 4
            if num_needed > num_left:
                raise OutOfBlocks(num_needed, num_left)
        starts = [given.num_cached_tokens, *self._windowed.skip_to(load, num_tokens)]
        self._transfers.run()
        for blocks, cache in zip(self._windowed.windows, self._caches, strict=True):
            blocks.do_moves(cache.do_move)  # they read blocks that may have been given to this load
        rows = [self._windowed.window_tables(group, [load])[0] for group in range(len(self._caches))]
        full_ids = given.block_ids[: num_tokens // self._windowed.block_size]
        tables, stream = [full_ids, *rows], side_stream(self._cache.device)

        def load_all() -> int:
            begin = time.perf_counter()
            with stream():
                is_there = self._stored.load(load.tokens, num_tokens, tables, starts, load.namespace)
            end = num_tokens if is_there else 0
            self._saw_load(max(end - starts[0], 0), time.perf_counter() - begin)
            return end

        return self._loaders.submit(load_all)

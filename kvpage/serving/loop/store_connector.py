"""StoreConnector: between the blocks of an engine and a store of chunks, beside the serving loop, never in its way.

    a request waits ─► lookup ─► its turn ─► blocks for all of its tokens ─► load ─► commit: the prefix tree has them,
                       thread                this thread                     thread  and the request finds them there
    on a GPU                                                    verified ─► commit; each layer waits for its bytes

    its prefill is done ─► pin the cached blocks ─► store ─► unpin
                           this thread              thread

Whatever goes wrong, or takes longer than the deadline, is a request that computes. A load that comes late goes into
the tree all the same. Until then it writes to blocks of its own. These are its own until the last byte is there.
"""

import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, wait

import numpy as np
import numpy.typing as npt

from kvpage.blocks.explain import GroupReach, StoreReach, StoreVerdict
from kvpage.blocks.load_or_compute import LoadOrCompute
from kvpage.blocks.manager import BlockManager
from kvpage.blocks.states import Allocation
from kvpage.cache.cache_engine import CacheEngine
from kvpage.cache.side_stream import side_stream
from kvpage.checks.interrupts import interruptible
from kvpage.serving.loop.moves.block_transfers import BlockTransfers
from kvpage.serving.loop.moves.layer_saves import Growth, LayerSaves
from kvpage.serving.loop.moves.loads.prefetches import Prefetch, Prefetches
from kvpage.serving.loop.moves.loads.prompt_loads import PromptLoad, PromptLoads
from kvpage.serving.loop.moves.loads.store_load import num_cached, num_seen
from kvpage.serving.loop.moves.loads.store_look import StoreLook
from kvpage.serving.loop.moves.loads.store_stats import StoreConnectorStats
from kvpage.serving.loop.moves.store_saves import Saves, StoreSaves
from kvpage.serving.loop.moves.written_layers import WrittenLayers
from kvpage.store.block_store import BlockStore, TokenIds
from kvpage.store.load.block_chunks import move_padding

__all__ = ["BlockStore", "StoreConnectorStats"]

NUM_LOADERS = 2


class StoreConnector(PromptLoads):
    """Loads and stores for one engine. All methods are for the engine's thread.

    transfers: the manager's moves; they come before a load writes to blocks that were evicted for it.
    rule: whether loading is worth it; None for always.
    deadline: seconds that a request waits for the store. max_loads, max_saves: under way at once.
    save_generated: store the generated tokens, too, once a request has finished.
    save_portions: store the chunks of a prompt while the rest of it is computed. saves: what is being stored.
    """

    def __init__(
        self,
        store: BlockStore,
        cache: CacheEngine,
        manager: BlockManager,
        transfers: BlockTransfers,
        rule: LoadOrCompute | None,
        *,
        deadline: float = 5.0,
        max_loads: int = 8,
        max_saves: int = 8,
        save_generated: bool = False,
        save_portions: bool = False,
    ) -> None:
        super().__init__(manager, deadline, max_loads, max_loads if store.waits_for_others else NUM_LOADERS)
        self.store = store
        self.save_generated, self.save_portions = save_generated, save_portions
        self.rule = rule
        self._cache, self._transfers, self._max_saves = cache, transfers, max_saves
        self.saves = self._saves = self._make_saves()
        self._prefetches = Prefetches(self._prefetch_call, max_loads // 2)
        self._newest_saves: deque[tuple[TokenIds, bytes]] = deque(maxlen=2 * max_saves)  # all under way are among them

    def rehearse(self) -> None:
        """Ask for the kernels that move chunks, where these are kvpage's own."""
        if self.store.metadata is not None:
            move_padding(self._cache, self.store.metadata.fmt)

    def reclaim(self) -> bool:
        """Wait for a load or a save that has blocks, so that these can be evicted; False if there is none."""
        if super().reclaim():
            return True
        if self._saves:
            with interruptible():
                wait(self._saves.futures[:1])
            self._poll()
            return True
        return False

    def save(self, tokens: TokenIds, namespace: bytes) -> None:
        """Store tokens that are committed, as far as they are cached in whole blocks on the device."""
        if len(self._saves) >= self._max_saves and not self._saves.has_begun(tokens, namespace):
            self.stats.note_skipped()
            return
        self._saves.begin(tokens, namespace)
        self._newest_saves.append((tokens, namespace))

    def save_portion(self, tokens: TokenIds, start: int, namespace: bytes) -> None:
        """Store the whole chunks of committed tokens, if those from `start` on have completed one.

        It leaves half of the places to prompts that are done. What it skips is stored with the next portion, as far as
        it is still cached then.
        """
        size = self._manager.block_size if self.store.config is None else self.store.config.chunk_size
        num_tokens = len(tokens) // size * size
        if num_tokens <= start // size * size:
            return
        if 2 * len(self._saves) < self._max_saves or self._saves.has_begun(tokens, namespace):
            self.save(tokens[:num_tokens], namespace)

    def begin_step(self, prompts: Iterable[Growth]) -> WrittenLayers | None:
        """Begin to store the first layers of chunks that a step completes, until `end_step`.

        Returns the object that wants to know of each layer that is written; None if nobody does.
        """
        if not isinstance(self._saves, LayerSaves):
            return None
        return self._saves.begin_step(prompts, max(self._max_saves // 2 - len(self._saves), 0))

    def end_step(self) -> None:
        """End what `begin_step` has begun, whether the step has ended well or not."""
        if isinstance(self._saves, LayerSaves):
            self._saves.end_step()

    def _make_saves(self) -> Saves:
        if self.store.groups:  # as LayerwiseStore
            return LayerSaves(self.store, self._manager, self._cache)
        return StoreSaves(self._store, self._manager, self._cache.device)

    def _store(self, tokens: TokenIds, block_ids: npt.NDArray[np.int32], namespace: bytes) -> int:
        return self.store.store_blocks(tokens, self._cache, block_ids, namespace=namespace)

    def drain(self) -> None:
        """Wait until everything that is under way is done, and forget what requests were asked for."""
        while futures := [*self._futures, *self._saves.futures, *self._prefetches.futures]:
            wait(futures, return_when="FIRST_COMPLETED")
            self._poll()
        self._let_all_go()

    def close(self) -> None:
        """Drain, and end the threads. The store stays open: it is its owner's."""
        self.drain()
        self._loaders.shutdown()
        self._saves.close()
        self._prefetches.close()

    # --- looks -------------------------------------------------------------------------------------------------------

    def explain(self, tokens: TokenIds, namespace: bytes) -> StoreReach:
        """Return how far the store reaches into a prompt that is not queued, and whether a request would load that.

        It waits for the store as long as a request does. Nothing is loaded, and nothing is counted.
        """
        look = StoreLook.begin(self._loaders, lambda: self._look(tokens, namespace))
        if (failed := look.wait(self._deadline)) is not None:
            return failed
        num_tokens = self._num_wanted(tokens, look.num_found)
        num_missing, size = num_tokens - self._num_seen(tokens, namespace), self._manager.block_size
        verdict = StoreVerdict.LOADS
        if num_missing < size:
            verdict = StoreVerdict.NO_MORE
        elif not self._is_worth(num_missing):
            verdict = StoreVerdict.NOT_WORTH_LOADING
        return StoreReach(num_tokens, verdict, look.groups)

    def _look(self, tokens: TokenIds, namespace: bytes) -> tuple[int, tuple[GroupReach, ...]]:
        """Return how many leading tokens the store has, and what it says of its groups, if it says anything."""
        explanation = self.store.explain(tokens, namespace)
        return explanation.num_cached_tokens, explanation.groups

    def _num_seen(self, tokens: TokenIds, namespace: bytes) -> int:
        return num_seen(self._manager, tokens, namespace)

    # --- loads -------------------------------------------------------------------------------------------------------

    def _num_cached(self, load: PromptLoad) -> int:
        return num_cached(self._manager, load.tokens, load.namespace)

    def _lookup(self, tokens: TokenIds, namespace: bytes) -> int:
        return self.store.lookup(tokens, namespace=namespace)

    def _num_wanted(self, tokens: TokenIds, num_found: int) -> int:
        """Return how many of the tokens that the store has are to be loaded: whole blocks."""
        return min(num_found, len(tokens) - 1) // self._manager.block_size * self._manager.block_size

    @property
    def _prefetch_call(self) -> Prefetch:
        return lambda tokens, namespace: self.store.prefetch(tokens, namespace=namespace)

    def _prefetch(self, load: PromptLoad) -> None:
        num_tokens = self._num_wanted(load.tokens, load.num_found or 0)
        if self._is_worth(num_tokens - self._num_cached(load)):
            self._prefetches.begin(load.tokens[:num_tokens], load.namespace)

    def _is_worth(self, num_tokens: int) -> bool:
        return self.rule is None or self.rule.should_load(num_tokens // self._manager.block_size)

    def _poll(self) -> None:
        super()._poll()
        done = self._saves.take_done()
        for save in done:
            self.stats.note_saved(self._result(save))
        for tokens, namespace in self._newest_saves if done else ():
            self._note_saved(tokens, namespace)
        num_errors = self._saves.take_failures() + self._prefetches.take_failures()
        self.stats.note_saves(num_errors, self._saves.seconds)

    def _into_blocks(self, load: PromptLoad, num_tokens: int, given: Allocation) -> "Future[int]":
        """Begin to load. Raise OutOfBlocks, with nothing begun, where there is no room beside these blocks."""
        self._transfers.run()
        size = self._manager.block_size
        start, stream = given.num_cached_tokens // size * size, side_stream(self._cache.device)
        call = load.call(self.store, self._cache, given.block_ids[: num_tokens // size], self._transfers.is_beside)

        def load_blocks() -> int:
            begin = time.perf_counter()
            with stream():
                end = call(start=start, namespace=load.namespace)
            end = min(end, num_tokens)
            self._saw_load(end - start, time.perf_counter() - begin)
            return end

        return self._loaders.submit(load_blocks)

    def _saw_load(self, num_tokens: int, seconds: float) -> None:
        self.stats.note_load_time(seconds)
        if self.rule and num_tokens > 0:
            self.rule.saw_transfer(num_tokens // self.rule.block_size * self.rule.block_bytes, seconds)

    def _finish_early(self, load: PromptLoad) -> None:
        """Commit verified tokens whose bytes are on their way. The load keeps its blocks until it is done.

        Not if others have committed some of them meanwhile: the tree would free the load's own.
        """
        size, (num_verified, arrival) = self._manager.block_size, load.take_verified()
        end = min(num_verified, load.num_wanted) // size * size
        if end <= load.num_cached:
            return
        known = num_cached(self._manager, load.tokens[:end], load.namespace, num_left_over=0)
        if known <= load.num_cached:
            self._transfers.expected.add(load.block_ids[load.num_cached // size : end // size], arrival)
            load.note_early(end, arrival)
            self._commit(load, end, is_early=True)
        if known >= end or load.num_early:
            load.set_ready()

    def _finish(self, load: PromptLoad, num_loaded: int) -> bool:
        """Commit the tokens that have come; return whether any have."""
        end = num_loaded // self._manager.block_size * self._manager.block_size
        try:
            if not load.num_early and end > load.num_cached:
                self._commit(load, end)
        finally:
            if load.arrival is not None:
                self._transfers.expected.discard(load.arrival)
        return end > load.num_cached

    def _commit(self, load: PromptLoad, end: int, is_early: bool = False) -> None:
        self._manager.commit(load, load.tokens[load.num_cached : end])
        self.stats.note_load(end - load.num_cached, is_early)
        load.request.group.note_loaded(end - load.num_cached)

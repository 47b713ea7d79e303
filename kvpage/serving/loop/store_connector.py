"""StoreConnector: between the blocks of an engine and a store of chunks, beside the serving loop, never in its way.

    a request waits ─► lookup ─► blocks for the tokens found ─► load ─► commit: the prefix tree has them, and the
                       thread    this thread                    thread  request, admitted now, finds them there
    on a GPU                                                    verified ─► commit; each layer waits for its bytes

    its prefill is done ─► pin the cached blocks ─► store ─► unpin
                           this thread              thread

Whatever goes wrong, or takes longer than the deadline, is a request that computes. A load that comes late goes into
the tree all the same. Until then it writes to blocks of its own. These are its own until the last byte is there.
"""

import time
from collections.abc import Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt

from kvpage.blocks.explain import GroupReach, StoreReach, StoreVerdict
from kvpage.blocks.load_or_compute import LoadOrCompute
from kvpage.blocks.manager import BlockManager
from kvpage.blocks.states import Allocation
from kvpage.cache.cache_engine import CacheEngine
from kvpage.cache.layered_moves import Arrival
from kvpage.cache.side_stream import side_stream
from kvpage.checks.errors import OutOfBlocks
from kvpage.checks.interrupts import interruptible, uninterrupted
from kvpage.checks.started_pool import started_pool
from kvpage.checks.wait_limit import WaitLimit, wait_for_one
from kvpage.serving.loop.moves.block_store import BlockStore, LayeredStore, TokenIds, check_engine
from kvpage.serving.loop.moves.block_transfers import BlockTransfers
from kvpage.serving.loop.moves.layer_saves import GroupedStore, Growth, LayerSaves
from kvpage.serving.loop.moves.store_load import StoreLoad, count_of, num_cached, num_seen
from kvpage.serving.loop.moves.store_look import StoreLook
from kvpage.serving.loop.moves.store_saves import Saves, StoreSaves
from kvpage.serving.loop.moves.written_layers import WrittenLayers
from kvpage.serving.loop.request import Request

__all__ = ["BlockStore", "LayeredStore", "StoreConnectorStats"]

NUM_LOADERS = 2


@dataclass(slots=True)
class StoreConnectorStats:
    """Counters since the engine was made.

    Attributes:
        num_lookups: Prompts that the store was asked for.
        num_lookup_tokens: Their tokens.
        num_found_tokens: Tokens that the store had beyond those that were cached.
        num_loads: Loads that have reached the prefix tree.
        num_loaded_tokens: Their tokens.
        num_early_loads: Those of them whose bytes were on their way still.
        num_refused_tokens: Tokens found and left there: computing was expected to be faster.
        num_late: Loads that their requests did not wait for.
        num_errors: Exceptions of the store, and answers that are no counts.
        num_stores: Prompts that were handed to the store.
        num_stored_tokens: Tokens that it held afterwards.
        num_skipped: Prompts that were not stored because too many were on their way.
        load_seconds: Time that the threads spent on loads.
        store_seconds: The same for storing.
    """

    num_lookups: int = 0
    num_lookup_tokens: int = 0
    num_found_tokens: int = 0
    num_loads: int = 0
    num_loaded_tokens: int = 0
    num_early_loads: int = 0
    num_refused_tokens: int = 0
    num_late: int = 0
    num_errors: int = 0
    num_stores: int = 0
    num_stored_tokens: int = 0
    num_skipped: int = 0
    load_seconds: float = 0.0
    store_seconds: float = 0.0


class StoreConnector:
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
        check_engine(store, cache)
        self.store = store
        self.stats = StoreConnectorStats()
        self.save_generated, self.save_portions = save_generated, save_portions
        self.rule = rule
        self._cache, self._manager, self._transfers = cache, manager, transfers
        self._deadline, self._max_loads, self._max_saves = deadline, max_loads, max_saves
        self._loads: dict[Request, StoreLoad] = {}
        self._late: list[StoreLoad] = []
        self._asked: set[Request] = set()
        waits_for_others = getattr(store, "waits_for_others", False)  # as ArrivingStore
        self._loaders = started_pool(max_loads if waits_for_others else NUM_LOADERS, "kvpage-load")
        self.saves = self._saves = self._make_saves()

    def ask(self, waiting: Iterable[Request]) -> bool:
        """Go on with everything under way, and ask for the first of the waiting; return whether that was all."""
        self._poll()
        for request in waiting:
            if len(self._loads) + len(self._late) >= self._max_loads:
                return False
            if request not in self._asked:
                self._asked.add(request)
                self._start(request)
        return True

    def holds(self, request: Request) -> bool:
        """Whether K and V for the request are on their way."""
        return request in self._loads

    def wait(self, limit: WaitLimit | None = None) -> None:
        """Wait until something is done that a request waits for, or is late; no longer than the limit."""
        futures = [future for load in self._loads.values() for future in load.futures]
        if futures:
            wait_for_one(futures, min(load.deadline for load in self._loads.values()), limit)

    def reclaim(self) -> bool:
        """Wait for a load or a save that holds blocks, so that these can be evicted; False if there is none."""
        for load in [*self._loads.values(), *self._late]:
            if load.has_blocks and load.future:
                with interruptible():
                    wait([load.future])
                self._poll()
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
            self.stats.num_skipped += 1
            return
        self._saves.begin(tokens, namespace)

    def save_portion(self, tokens: TokenIds, start: int, namespace: bytes) -> None:
        """Store the whole chunks of committed tokens, if those from `start` on have completed one.

        It leaves half of the places to prompts that are done. What it skips is stored with the next portion, as far as
        it is still cached then.
        """
        size = getattr(getattr(self.store, "config", None), "chunk_size", self._manager.block_size)
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
        if hasattr(self.store, "groups"):  # as LayerwiseStore
            return LayerSaves(cast(GroupedStore, self.store), self._manager, self._cache)
        return StoreSaves(self._store, self._manager, self._cache.device)

    def _store(self, tokens: TokenIds, block_ids: npt.NDArray[np.int32], namespace: bytes) -> int:
        return self.store.store_blocks(tokens, self._cache, block_ids, namespace=namespace)

    def forget(self, request: Request) -> None:
        """Forget a request that has ended; a load that is under way for it goes on for others."""
        self._asked.discard(request)
        if load := self._loads.pop(request, None):
            self._late.append(load)

    def drain(self) -> None:
        """Wait until everything that is under way is done."""
        while self._loads or self._late or self._saves:
            futures = [load.future for load in (*self._loads.values(), *self._late) if load.future]
            wait([*futures, *self._saves.futures], return_when="FIRST_COMPLETED")
            self._poll()

    def close(self) -> None:
        """Drain, and end the threads. The store stays open: it is its owner's."""
        self.drain()
        self._loaders.shutdown()
        self._saves.close()

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
        elif self.rule and not self.rule.should_load(num_missing // size):
            verdict = StoreVerdict.NOT_WORTH_LOADING
        return StoreReach(num_tokens, verdict, look.groups)

    def _look(self, tokens: TokenIds, namespace: bytes) -> tuple[int, tuple[GroupReach, ...]]:
        """Return how many leading tokens the store has, and what it says of its groups, if it says anything."""
        if not hasattr(self.store, "explain"):
            return self._lookup(tokens, namespace), ()
        groups = self.store.explain(tokens, namespace).groups
        return groups[0].num_tokens, groups

    def _num_seen(self, tokens: TokenIds, namespace: bytes) -> int:
        return num_seen(self._manager, tokens, namespace)

    # --- loads -------------------------------------------------------------------------------------------------------

    def _start(self, request: Request) -> None:
        load = StoreLoad(request, time.monotonic() + self._deadline)
        if len(load.tokens) - 1 - self._num_cached(load) < self._manager.block_size:
            return
        load.begin(self._loaders.submit(lambda: self._lookup(load.tokens, load.namespace)))
        self.stats.num_lookups += 1
        self.stats.num_lookup_tokens += len(load.tokens)
        self._loads[request] = load

    def _num_cached(self, load: StoreLoad) -> int:
        return num_cached(self._manager, load.tokens, load.namespace)

    def _lookup(self, tokens: TokenIds, namespace: bytes) -> int:
        return self.store.lookup(tokens, namespace=namespace)

    def _num_wanted(self, tokens: TokenIds, num_found: int) -> int:
        """Return how many of the tokens that the store has are to be loaded: whole blocks."""
        return min(num_found, len(tokens) - 1) // self._manager.block_size * self._manager.block_size

    @uninterrupted
    def _poll(self) -> None:
        now = time.monotonic()
        for load in [*self._loads.values(), *self._late]:
            if load.future and load.future.done():
                self._take(load)
            elif load.request not in self._loads:
                continue
            elif (found := load.take_verified()) is not None:
                self._finish_early(load, *found)
            elif now >= load.deadline:
                self.stats.num_late += 1
                self._late.append(self._loads.pop(load.request))
        for done in self._saves.take_done():
            self.stats.num_stores += 1
            self.stats.num_stored_tokens += self._result(done)
        self.stats.num_errors += self._saves.take_failures()
        self.stats.store_seconds = self._saves.seconds

    def _take(self, load: StoreLoad) -> None:
        """Take the result of a lookup, or of a load."""
        result = self._result(load.take())
        has_begun = False
        try:
            if load.has_blocks:
                self._finish(load, result)
            elif load.request in self._loads:
                has_begun = self._begin(load, result)
        finally:
            if not has_begun:
                self._over(load)

    def _over(self, load: StoreLoad) -> None:
        if self._loads.get(load.request) is load:
            del self._loads[load.request]
        else:
            self._late.remove(load)

    def _begin(self, load: StoreLoad, num_found: int) -> bool:
        """Begin a load into blocks of its own; False if it is not worth it, or blocks are short."""
        num_tokens = self._num_wanted(load.tokens, num_found)
        num_missing = num_tokens - self._num_cached(load)
        if num_missing < self._manager.block_size:
            return False
        self.stats.num_found_tokens += num_missing
        if self.rule and not self.rule.should_load(num_missing // self._manager.block_size):
            self.stats.num_refused_tokens += num_missing
            return False
        try:
            given = self._manager.allocate(load, load.tokens[:num_tokens], load.namespace)
        except OutOfBlocks:
            return False
        try:
            load.begin_in(given, num_tokens, self._into_blocks(load, num_tokens, given))
        except BaseException as error:
            self._manager.release(load)
            if isinstance(error, OutOfBlocks):
                return False
            raise
        return True

    def _into_blocks(self, load: StoreLoad, num_tokens: int, given: Allocation) -> "Future[int]":
        """Begin to load. Raise OutOfBlocks, with nothing begun, where there is no room beside these blocks."""
        self._transfers.run()
        size = self._manager.block_size
        start, stream = given.num_cached_tokens // size * size, side_stream(self._cache.device)
        call = load.call(self.store, self._cache, given.block_ids, self._transfers.is_beside)

        def load_blocks() -> int:
            begin = time.perf_counter()
            with stream():
                end = call(start=start, namespace=load.namespace)
            end = min(end, num_tokens)
            self._saw_load(end - start, time.perf_counter() - begin)
            return end

        return self._loaders.submit(load_blocks)

    def _saw_load(self, num_tokens: int, seconds: float) -> None:
        self.stats.load_seconds += seconds
        if self.rule and num_tokens > 0:
            self.rule.saw_transfer(num_tokens // self.rule.block_size * self.rule.block_bytes, seconds)

    def _finish_early(self, load: StoreLoad, num_verified: int, arrival: Arrival) -> None:
        """Commit verified tokens whose bytes are on their way. The load keeps its blocks until it is done.

        Not if others have committed some of them meanwhile: the tree would free the load's own.
        """
        size = self._manager.block_size
        end = min(num_verified, load.num_wanted) // size * size
        if end <= load.num_cached:
            return
        known = num_cached(self._manager, load.tokens[:end], load.namespace, num_left_over=0)
        if known <= load.num_cached:
            self._transfers.expected.add(load.block_ids[load.num_cached // size : end // size], arrival)
            load.note_early(end, arrival)
            self._commit(load, end)
            self.stats.num_early_loads += 1
        if known >= end or load.num_early:
            self._late.append(self._loads.pop(load.request))

    def _finish(self, load: StoreLoad, num_loaded: int) -> None:
        """Commit the tokens that have come, and free the other blocks. Forget those that have not come after all."""
        end = num_loaded // self._manager.block_size * self._manager.block_size
        try:
            if not load.num_early and end > load.num_cached:
                self._commit(load, end)
        finally:
            self._manager.release(load)
            if load.arrival is not None:
                self._transfers.expected.discard(load.arrival)
        if end < load.num_early:
            self._manager.space.drop(load.tokens[: load.num_early], load.namespace)

    def _commit(self, load: StoreLoad, end: int) -> None:
        self._manager.commit(load, load.tokens[load.num_cached : end])
        self.stats.num_loads += 1
        self.stats.num_loaded_tokens += end - load.num_cached
        load.request.group.note_loaded(end - load.num_cached)

    def _result(self, future: "Future[int]") -> int:
        """Return the count that the store has returned; 0 for an exception, and for an answer that is no count."""
        count = count_of(future)
        self.stats.num_errors += count is None
        return count or 0

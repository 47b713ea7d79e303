"""PromptLoads: prompts on their way out of a store, each when the turn of its request comes.

    a request is among the first that wait ─► look it up: no blocks yet ─► fetch it into the host's memory  threads
    its turn comes                         ─► blocks for all of its tokens, as its admission takes ─► load    thread
    all is there                           ─► commit; it is admitted, and finds the tokens in the prefix tree

A prefix is loaded once: other requests with the same prefix wait for the load. A request that finds no room is loaded
at its next turn, and one that was preempted is asked for again. Whatever takes longer than the deadline is computed. A
load that comes late goes into the tree all the same.
"""

import time
from collections.abc import Iterable
from concurrent.futures import Future, wait
from itertools import islice
from typing import Any

from kvpage.blocks.explain import Explanation, StoreReach, StoreVerdict
from kvpage.blocks.load_or_compute import LoadOrCompute
from kvpage.blocks.manager import BlockManager
from kvpage.blocks.sequence_state import Allocation
from kvpage.cache.side_stream import side_stream
from kvpage.checks.errors import OutOfBlocks
from kvpage.checks.interrupts import interruptible, uninterrupted
from kvpage.checks.started_pool import started_pool
from kvpage.checks.wait_limit import WaitLimit, wait_for_one
from kvpage.serving.loop.moves.block_transfers import BlockTransfers
from kvpage.serving.loop.moves.loads.prefetches import Prefetches
from kvpage.serving.loop.moves.loads.store_stats import StoreConnectorStats
from kvpage.serving.loop.moves.store_load import StoreLoad, count_of, num_shared
from kvpage.serving.loop.moves.stored_group import StoredGroup
from kvpage.serving.loop.request import Request
from kvpage.store.block_store import TokenIds, is_count

PromptLoad = StoreLoad[Request]
NUM_LOADERS = 2


class PromptLoads:
    """Lookups and loads of one engine. All methods are for the engine's thread.

    group: what is loaded. transfers: the manager's moves. rule: whether loading is worth it, states and windows
        included: its speed is that of earlier loads of as many blocks; None for always.
    deadline: seconds that a request waits for the store. max_loads: lookups and loads under way at once.
    waits_for_others: whether loads wait for other workers. Each has a thread of its own then.
    """

    def __init__(
        self,
        group: StoredGroup,
        manager: BlockManager,
        transfers: BlockTransfers,
        rule: LoadOrCompute | None,
        *,
        deadline: float = 5.0,
        max_loads: int = 8,
        waits_for_others: bool = False,
    ) -> None:
        self.stats, self.rule = StoreConnectorStats(), rule
        self._group, self._manager, self._transfers = group, manager, transfers
        self._deadline, self._max_loads = deadline, max_loads
        self._loads: dict[Request, PromptLoad] = {}  # of those that wait
        self._over: set[Request] = set()  # of those that wait: nothing more is to come
        self._late: list[PromptLoad] = []  # under way, and nobody waits for them
        self._loaders = started_pool(max_loads if waits_for_others else NUM_LOADERS, "kvpage-load")
        self._questions = started_pool(1, "kvpage-question")  # no load waits for these, however slow the store is
        self._prefetches = Prefetches(group.prefetch, max_loads // 2)

    # --- what the scheduler asks -------------------------------------------------------------------------------------

    def ask(self, waiting: Iterable[Request]) -> None:
        """Look up the first of the waiting, so that their turns begin at once.

        The very first one waits for the answer: nobody makes way for it before.
        """
        for index, request in enumerate(islice(waiting, self._max_loads // 2)):
            if self._may_ask(request) and self._has_place:
                load = self._load_of(request)
                if load.num_found is None and load.future is None and self._look_up(load) and not index:
                    load.set_waiting(True, self._deadline)

    def holds(self, request: Request) -> bool:
        """Whether K and V for the request, whose turn has come, are on their way."""
        load = self._loads.get(request)
        return load is not None and load.deadline is not None and load.is_under_way

    def has_blocks(self, request: Request) -> bool:
        """Whether a load has taken blocks for all of its tokens, and keeps them for it."""
        load = self._loads.get(request)
        return load is not None and load.has_blocks

    def begin(self, request: Request, num_spare: int) -> bool:
        """Look up or load a request whose turn has come; return whether it is to wait for that.

        num_spare: blocks that its load leaves.
        """
        if not self._may_ask(request):
            return False
        load = self._load_of(request)
        waits = load.is_under_way or (not load.is_ready and self._go_on(load, num_spare))
        load.set_waiting(waits, self._deadline)
        return waits

    def hand_over(self, request: Request) -> None:
        """Give back the blocks of a load whose request is admitted, or has ended. One under way goes on for others."""
        self._over.discard(request)
        load = self._loads.pop(request, None)
        if load is not None:
            self._let_go(load)

    def wait(self, limit: WaitLimit | None = None) -> None:
        """Wait until something is done that a request waits for, or is late; no longer than the limit."""
        waiting = [load for load in self._loads.values() if load.deadline is not None]
        futures = self._load_futures + [load.verified for load in waiting if load.verified is not None]
        if futures and waiting:
            wait_for_one(futures, min(load.deadline or 0.0 for load in waiting), limit)
            return
        for load in waiting:
            self._give_up(load)  # nothing runs, and nothing is under way that would make room for it

    def bring_nearer(self, tokens: TokenIds, namespace: bytes) -> None:
        """Bring what the store has of tokens nearer, within the store; not where too many are on their way."""
        self._prefetches.begin(tokens, namespace)

    def reclaim(self) -> bool:
        """Give back the blocks of the load that is last in order, once it is done; False if no load has any."""
        loads = sorted(self._loads.values(), key=lambda load: load.request.order, reverse=True)
        for load in (*loads, *self._late):
            if not load.has_blocks:
                continue
            if load.future is not None:
                with interruptible():
                    wait([load.future])
                self.poll()
            if self._loads.get(load.request) is load:
                self.hand_over(load.request)
            return True
        return False

    def question(self, tokens: TokenIds, namespace: bytes) -> "Future[Explanation]":
        """Ask the store what it has of a prompt that is not queued. Nothing is loaded, and nothing is counted."""
        return self._questions.submit(lambda: self._group.explain(tokens, namespace))

    def reach(self, answer: "Future[Explanation]", tokens: TokenIds, namespace: bytes) -> StoreReach:
        """Return how far the store reaches into a prompt, and whether a request would load that.

        answer: To a `question` of the same prompt. One that is not there by now is late.
        """
        if not answer.done():
            answer.cancel()  # if no thread has taken it up
            return StoreReach(0, StoreVerdict.LATE)
        if (error := answer.exception()) is not None:
            return StoreReach(0, StoreVerdict.FAILED, error=repr(error))
        num_there, groups = answer.result().num_cached_tokens, answer.result().groups
        if not is_count(num_there):
            return StoreReach(0, StoreVerdict.FAILED, error=f"{num_there!r} is no number of tokens")
        num_tokens = self._group.num_wanted(tokens, num_there)
        num_missing = num_tokens - self._group.num_seen(tokens, namespace)
        verdict = StoreVerdict.LOADS
        if num_missing < self._manager.block_size:
            verdict = StoreVerdict.NO_MORE
        elif not self._is_worth(num_missing):
            verdict = StoreVerdict.NOT_WORTH_LOADING
        return StoreReach(num_tokens, verdict, groups)

    # --- what is under way --------------------------------------------------------------------------------------------

    @property
    def futures(self) -> "list[Future[Any]]":
        """Return the lookups, loads and prefetches under way."""
        return [*self._load_futures, *self._prefetches.futures]

    @uninterrupted
    def poll(self) -> None:
        """Go on with everything under way."""
        now = time.monotonic()
        for load in [*self._loads.values(), *self._late]:
            if load.future is not None and load.future.done():
                self._take(load)
            elif self._loads.get(load.request) is not load:
                continue
            elif load.is_verified:
                self._finish_early(load)
            elif load.deadline is not None and now >= load.deadline:
                self.stats.num_late += load.future is not None  # else it waits for a place, or for another's load
                self._give_up(load)
        self.stats.num_errors += self._prefetches.take_failures()

    def note_saved(self, tokens: TokenIds, namespace: bytes) -> None:
        """Note that tokens may be stored now, of which a lookup did not know."""
        for load in self._loads.values():
            load.note_saved(tokens, namespace, self._manager.block_size)

    def result(self, future: "Future[int]") -> int:
        """Return the count that the store has returned; 0 for an exception, and for an answer that is no count."""
        count = count_of(future)
        self.stats.num_errors += count is None
        return count or 0

    @uninterrupted
    def let_all_go(self) -> None:
        """Forget all that was asked, once nothing is under way."""
        for request in list(self._loads):
            self.hand_over(request)
        self._over.clear()

    def close(self) -> None:
        """End the threads; nothing is under way."""
        self._loaders.shutdown()
        self._questions.shutdown(cancel_futures=True)
        self._prefetches.close()

    # --- the way of a load --------------------------------------------------------------------------------------------

    def _may_ask(self, request: Request) -> bool:
        return request not in self._over and not self._manager.is_swapped(request.seq_id)

    @property
    def _has_place(self) -> bool:
        under_way = sum(load.future is not None for load in self._loads.values())
        return under_way + len(self._late) < self._max_loads

    def _load_of(self, request: Request) -> PromptLoad:
        if request not in self._loads:
            self._loads[request] = StoreLoad(request)
        return self._loads[request]

    def _go_on(self, load: PromptLoad, num_spare: int) -> bool:
        """Take the next step of a load whose turn has come; return whether its request waits for something."""
        if load.num_found is None or load.is_outdated:
            return self._look_up(load)
        if any(self._brings_for(other, load) for other in self._loads.values()):
            return True
        num_tokens = self._group.num_wanted(load.tokens, load.num_found)
        num_missing = num_tokens - self._num_cached(load)
        if num_missing < self._manager.block_size:
            return False
        if not self._has_place:
            return len(self._late) < self._max_loads
        return self._begin(load, num_tokens, num_missing, num_spare)

    def _look_up(self, load: PromptLoad) -> bool:
        """Ask the store, if something is missing; return whether the request waits for the answer."""
        if len(load.tokens) - 1 - self._num_cached(load) < self._manager.block_size:
            load.take_answer(0, is_outdated=True)  # it may be evicted before the turn comes
            return False
        if not self._has_place:
            return len(self._late) < self._max_loads
        load.begin(self._loaders.submit(lambda: self._group.lookup(load.tokens, load.namespace)))
        if load.request.group.note_asked():
            self.stats.num_lookups += 1
            self.stats.num_lookup_tokens += len(load.tokens)
        return True

    def _brings_for(self, other: PromptLoad, load: PromptLoad) -> bool:
        """Return whether a load under way brings at least a block of tokens that another one's request lacks."""
        if other is load or other.deadline is None or not other.is_under_way:
            return False
        size = self._manager.block_size
        return num_shared(load, other, size) // size * size >= self._num_cached(load) + size

    def _begin(self, load: PromptLoad, num_tokens: int, num_missing: int, num_spare: int) -> bool:
        """Begin a load into blocks of its own; return whether its request waits for it."""
        is_new = load.request.group.note_found()
        is_worth = self._is_worth(num_missing)
        self.stats.num_found_tokens += is_new * num_missing
        self.stats.num_refused_tokens += is_new * (not is_worth) * num_missing
        if not is_worth:
            self._give_up(load)
            return False
        num_promoted = self._manager.space.num_promoted_blocks
        try:
            allocation = self._manager.allocate(
                load, load.tokens, load.namespace, num_spare=num_spare, is_counted=False
            )
        except OutOfBlocks:
            return False  # nor can it be admitted
        try:
            size, future = self._manager.block_size, self._into_blocks(load, num_tokens, allocation)
            load.begin_in(allocation, num_tokens, size, future)
        except BaseException as error:
            self._manager.release(load)
            if isinstance(error, OutOfBlocks):
                return True
            raise
        num_promoted = self._manager.space.num_promoted_blocks - num_promoted
        load.request.group.note_loaded(num_promoted * self._manager.block_size)
        return True

    def _take(self, load: PromptLoad) -> None:
        """Take the result of a lookup, or of a load."""
        waits = self._loads.get(load.request) is load
        try:
            result = self.result(load.take())
            if load.has_blocks:
                self._arrive(load, result, waits)
            else:
                load.take_answer(result)
                if waits and load.deadline is None and result - self._num_cached(load) >= self._manager.block_size:
                    self._prefetch(load)
                load.set_waiting(False, self._deadline)
        finally:
            if not waits:
                self._late.remove(load)

    def _arrive(self, load: PromptLoad, num_loaded: int, waits: bool) -> None:
        """Take what a load has brought. waits: whether its request still does."""
        has_come = False
        try:
            has_come = self._finish(load, num_loaded)
        finally:
            if waits and has_come:
                load.set_ready()
            elif waits:
                self._give_up(load)
            else:
                self._release(load)
            self._forget_missing(load, num_loaded)

    def _forget_missing(self, load: PromptLoad, num_loaded: int) -> None:
        """Forget the tokens that were committed early, and have not come after all."""
        if num_loaded // self._manager.block_size * self._manager.block_size < load.num_early:
            if load.has_blocks:
                self._give_up(load)
            self._manager.space.drop(load.tokens[: load.num_early], load.namespace)

    def _give_up(self, load: PromptLoad) -> None:
        """Let the request compute: nothing more is to come while it waits."""
        self._over.add(load.request)
        self._let_go(self._loads.pop(load.request))

    def _let_go(self, load: PromptLoad) -> None:
        """Give back the blocks that nothing is written to."""
        if load.future is None:
            self._release(load)
            return
        self._late.append(load)
        if load.num_early:
            self._manager.give_back_room(load)

    def _release(self, load: PromptLoad) -> None:
        if load.has_blocks:
            load.leave_blocks()
            self._manager.release(load)

    def _num_cached(self, load: PromptLoad) -> int:
        """Return how many of its tokens a request would find cached."""
        return self._group.num_cached(load.tokens, load.namespace)

    def _is_worth(self, num_tokens: int) -> bool:
        """Return whether loading the blocks is expected to be faster than computing them."""
        return self.rule is None or self.rule.should_load(num_tokens // self._manager.block_size)

    def _prefetch(self, load: PromptLoad) -> None:
        """Bring what a lookup has told nearer, where that can be done without blocks: its turn has not come."""
        num_tokens = self._group.num_wanted(load.tokens, load.num_found or 0)
        if self._is_worth(num_tokens - self._num_cached(load)):
            self._prefetches.begin(load.tokens[:num_tokens], load.namespace)

    def _into_blocks(self, load: PromptLoad, num_tokens: int, allocation: Allocation) -> "Future[int]":
        """Begin to load. Raise OutOfBlocks, with nothing begun, where there is no room beside these blocks."""
        loading = self._group.begin_load(load, num_tokens, allocation)
        stream = side_stream(self._group.device)

        def run() -> int:
            begin = time.perf_counter()
            with stream():
                end = loading.run()
            end = min(end, num_tokens)
            self._saw_load(max(end - loading.start, 0), time.perf_counter() - begin)
            return end

        return self._loaders.submit(run)

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
        known = self._manager.tree.look(load.tokens[:end], load.namespace)[0].shape[1] * size
        if known <= load.num_cached:
            self._transfers.expected.add(load.block_ids[load.num_cached // size : end // size], arrival)
            load.note_early(end, arrival)
            self._commit(load, end, is_early=True)
        if known >= end or load.num_early:
            load.set_ready()

    def _finish(self, load: PromptLoad, num_loaded: int) -> bool:
        """Commit the tokens that have come; return whether any have."""
        end = self._group.num_usable(load, num_loaded)
        try:
            if not load.num_early and end > load.num_cached:
                self._commit(load, end)
                self._group.keep_end(load)
        finally:
            if load.arrival is not None:
                self._transfers.expected.discard(load.arrival)
        return end > load.num_cached

    def _commit(self, load: PromptLoad, end: int, is_early: bool = False) -> None:
        self._manager.commit(load, load.tokens[load.num_cached : end])
        self.stats.note_load(end - load.num_cached, is_early)
        load.request.group.note_loaded(end - load.num_cached)

    @property
    def _load_futures(self) -> "list[Future[Any]]":
        return [load.future for load in (*self._loads.values(), *self._late) if load.future is not None]

"""PromptLoads: prompts on their way out of a store, each when the turn of its request comes.

    a request is among the first that wait ─► look it up: no blocks yet ─► fetch it into the host's memory  threads
    its turn comes                         ─► blocks for all of its tokens, as its admission takes ─► load    thread
    all is there                           ─► commit; it is admitted, and finds the tokens in the prefix tree

What one load brings is loaded once: others with the same prefix wait for it. A request that finds no room is loaded
at its next turn, and one that was preempted is asked for again. Whatever takes longer than the deadline is computed. A
load that comes late goes into the tree all the same.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from concurrent.futures import Future, wait
from itertools import islice
from typing import Any

from kvpage.blocks.manager import BlockManager
from kvpage.blocks.states import Allocation
from kvpage.checks.errors import OutOfBlocks
from kvpage.checks.interrupts import interruptible, uninterrupted
from kvpage.checks.started_pool import started_pool
from kvpage.checks.wait_limit import WaitLimit, wait_for_one
from kvpage.serving.loop.moves.loads.store_load import StoreLoad, count_of, num_shared
from kvpage.serving.loop.moves.loads.store_stats import StoreConnectorStats
from kvpage.serving.loop.request import Request
from kvpage.store.block_store import TokenIds

PromptLoad = StoreLoad[Request]


class PromptLoads(ABC):
    """Lookups and loads of one engine. All methods are for the engine's thread.

    deadline: seconds that a request waits for the store. max_loads: lookups and loads under way at once, in
        num_threads threads.
    """

    def __init__(self, manager: BlockManager, deadline: float, max_loads: int, num_threads: int) -> None:
        self.stats = StoreConnectorStats()
        self._manager, self._deadline, self._max_loads = manager, deadline, max_loads
        self._loads: dict[Request, PromptLoad] = {}  # of those that wait
        self._over: set[Request] = set()  # of those that wait: nothing more is to come
        self._late: list[PromptLoad] = []  # under way, and nobody waits for them
        self._loaders = started_pool(num_threads, "kvpage-load")

    # --- what the scheduler asks -------------------------------------------------------------------------------------

    def ask(self, waiting: Iterable[Request]) -> None:
        """Go on with everything under way, and look up the first of the waiting, so that their turns begin at once.

        The very first one waits for the answer: nobody makes way for it before.
        """
        self._poll()
        for place, request in enumerate(islice(waiting, self._max_loads // 2)):
            if self._may_ask(request) and self._has_place:
                load = self._load_of(request)
                if load.num_found is None and load.future is None and self._look_up(load) and not place:
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
        futures = self._futures + [load.verified for load in waiting if load.verified is not None]
        if futures and waiting:
            wait_for_one(futures, min(load.deadline or 0.0 for load in waiting), limit)
            return
        for load in waiting:
            self._give_up(load)  # nothing runs, and nothing is under way that would make room for it

    def reclaim(self) -> bool:
        """Give back the blocks of the load that is last in order, once it is done; False if no load has any."""
        loads = sorted(self._loads.values(), key=lambda load: load.request.order, reverse=True)
        for load in (*loads, *self._late):
            if not load.has_blocks:
                continue
            if load.future is not None:
                with interruptible():
                    wait([load.future])
                self._poll()
            if self._loads.get(load.request) is load:
                self.hand_over(load.request)
            return True
        return False

    # --- the way of a load -------------------------------------------------------------------------------------------

    @abstractmethod
    def _num_cached(self, load: PromptLoad) -> int:
        """Return how many of its tokens a request would find cached."""

    @abstractmethod
    def _lookup(self, tokens: TokenIds, namespace: bytes) -> int:
        """Return how many leading tokens the store has. Called in a thread."""

    @abstractmethod
    def _num_wanted(self, tokens: TokenIds, num_found: int) -> int:
        """Return how many of the tokens that the store has are to be loaded."""

    @abstractmethod
    def _prefetch(self, load: PromptLoad) -> None:
        """Bring what a lookup has found nearer, where that can be done without blocks: its turn has not come."""

    @abstractmethod
    def _is_worth(self, num_tokens: int) -> bool:
        """Return whether loading so many is expected to be faster than computing them."""

    @abstractmethod
    def _into_blocks(self, load: PromptLoad, num_tokens: int, given: Allocation) -> "Future[int]":
        """Begin to load. Raise OutOfBlocks, with nothing begun, where there is no room beside these blocks."""

    @abstractmethod
    def _finish_early(self, load: PromptLoad) -> None:
        """Commit tokens that are verified, and whose bytes are on their way, if that is news."""

    @abstractmethod
    def _finish(self, load: PromptLoad, num_loaded: int) -> bool:
        """Commit the tokens that have come; return whether any have."""

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
        num_tokens = self._num_wanted(load.tokens, load.num_found)
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
        load.begin(self._loaders.submit(lambda: self._lookup(load.tokens, load.namespace)))
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
            given = self._manager.allocate(load, load.tokens, load.namespace, num_spare=num_spare, is_counted=False)
        except OutOfBlocks:
            return False  # nor can it be admitted
        try:
            size, future = self._manager.block_size, self._into_blocks(load, num_tokens, given)
            load.begin_in(given, num_tokens, size, future)
        except BaseException as error:
            self._manager.release(load)
            if isinstance(error, OutOfBlocks):
                return True
            raise
        num_promoted = self._manager.space.num_promoted_blocks - num_promoted
        load.request.group.note_loaded(num_promoted * self._manager.block_size)
        return True

    @uninterrupted
    def _poll(self) -> None:
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

    def _take(self, load: PromptLoad) -> None:
        """Take the result of a lookup, or of a load."""
        waits = self._loads.get(load.request) is load
        try:
            result = self._result(load.take())
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

    @uninterrupted
    def _let_all_go(self) -> None:
        """Forget all that was asked, once nothing is under way."""
        for request in list(self._loads):
            self.hand_over(request)
        self._over.clear()

    @property
    def _futures(self) -> "list[Future[Any]]":
        """What is under way."""
        return [load.future for load in (*self._loads.values(), *self._late) if load.future is not None]

    def _note_saved(self, tokens: TokenIds, namespace: bytes) -> None:
        """Note that tokens may be stored now, of which a lookup did not know."""
        for load in self._loads.values():
            load.note_saved(tokens, namespace, self._manager.block_size)

    def _result(self, future: "Future[int]") -> int:
        """Return the count that the store has returned; 0 for an exception, and for an answer that is no count."""
        count = count_of(future)
        self.stats.num_errors += count is None
        return count or 0

"""Scheduler: which tokens of which requests the next step computes. It owns the block manager; no tensors, no sampling.

    add ─► waiting ──admit──► running: prefill, in portions ─► decode, a token a step ─► finish
              ▲                  │
              └────preempt───────┘   blocks are short: the last in order loses its own (to the host, or for good)

Requests with a lower `priority` come first; those with the same one are served first come, first served. `waiting` is
kept in this order, also for requests that come back. A waiting request preempts running requests of higher numbers.

Every request finishes, once those before it in order have:

- `check` refuses a request that does not fit into all blocks together.
- A step gives its tokens to the decoding requests first. It admits nothing before every running request has its share,
  so a running prefill waits at most for a finite number of decodes.
- Only the last running request in order is preempted, hence never the first while another runs. Alone, the first has
  blocks enough: all others are free or evictable. So it gets to its end, then the next one does. Of the samples of one
  prompt, each a request from its first token on, the first one comes first.
- The first waiting request is passed over only while another's prefill computes blocks that it will share, or while a
  store sends K and V for it. That prefill ends or is preempted; the store has a deadline. Loads take their blocks at
  their requests' turns, and by the same rule as admissions, so that what was loaded finds a place.
- With nothing running it is admitted: all blocks are free, or held by something that is no running request (`Branches`,
  loads for those behind it). Then the reclaimers are asked for blocks. If that is not enough, `schedule` raises
  OutOfBlocks.

Whether a request fits is checked before anything changes for it, so that one that waits costs nobody a cached block.
"""

from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter

import numpy as np

from kvpage.blocks.explain import Explanation
from kvpage.blocks.manager import BlockManager
from kvpage.blocks.stats import Preemptions
from kvpage.checks.errors import OutOfBlocks
from kvpage.checks.values import check_at_least
from kvpage.serving.loop.batch.batch import Batch, Decodes, Portion, add_portion
from kvpage.serving.loop.batch.prefills import Prefills
from kvpage.serving.loop.batch.request_blocks import RequestBlocks
from kvpage.serving.loop.batch.window_room import WindowRoom
from kvpage.serving.loop.moves.loads.turns import Turns
from kvpage.serving.loop.request import Request

Outcome = Callable[[Request], bool | None]
"""Whether a step ahead has computed a request's newest token; None if the request is in no such step."""
Reclaimer = Callable[[], bool]
"""Gives back some blocks that it holds for no request; False if it cannot."""


class Scheduler:
    """Requests in two lists, with their blocks in `manager`. A batch ends in `complete`, and if it fails in `requeue`.

    window: of the attention of all layers; None if one of them sees everything.
    turns: what waiting requests get when their turns come.
    reclaimers: asked for blocks, in order, where running requests cannot give any.
    explains: whether each request is to know how far the cache reached into its prompt, and why not further.
    """

    def __init__(
        self,
        manager: BlockManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        window: int | None = None,
        *,
        turns: Turns | None = None,
        reclaimers: Iterable[Reclaimer] = (),
        explains: bool = False,
    ) -> None:
        check_at_least("max_num_seqs", max_num_seqs, 1)
        check_at_least("max_num_batched_tokens", max_num_batched_tokens, 1)
        self.manager, self._num_blocks, self._block_size = manager, manager.num_blocks, manager.block_size
        self._blocks, self._windows = RequestBlocks(manager), WindowRoom(manager, window)
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.preemptions = Preemptions()
        self.num_prompt_tokens = self.num_cached_tokens = 0  # at first admissions
        # How often requests have left `running`; were put into `waiting`, or are to be looked at anew there.
        self.num_left = self.num_queued = 0
        self._decodes = Decodes([], np.empty(0, np.int64))  # of the last step
        self._has_priorities = False
        self._turns, self.reclaimers, self._explains = turns or Turns(), list(reclaimers), explains
        self._outcome_ahead: Outcome = lambda request: None  # of the step that was begun ahead of the last batch

    def use_outcomes(self, outcome_ahead: Outcome) -> None:
        """Ask for the outcomes of steps that are begun ahead of the last batch; by default there are none."""
        self._outcome_ahead = outcome_ahead

    def add(self, request: Request) -> None:
        """Queue a request that `check` has passed, or that comes back."""
        self._has_priorities = self._has_priorities or request.group.priority != 0
        insort(self.waiting, request, key=attrgetter("order"))
        self.num_queued += 1

    def check(self, request: Request) -> None:
        """ValueError if it would not fit even with all blocks, or all places, for itself. Any thread may call it."""
        if request.params.n > self.max_num_seqs:
            raise ValueError(f"n must be at most max_num_seqs={self.max_num_seqs}, got {request.params.n}")
        num_written = len(request.tokens) - 1  # the last generated token is never fed back
        needed = -(-num_written // self._block_size)
        if needed > self._num_blocks:
            raise ValueError(
                f"prompt and max_tokens must fit into {self._num_blocks} blocks of "
                f"{self._block_size} tokens, got {request.num_prompt_tokens} + {request.params.max_tokens} "
                f"tokens, {needed} blocks"
            )

    def schedule(self, tried: Sequence[Request] = ()) -> Batch:
        """Return the next step. The blocks of its portions are allocated.

        tried: the only requests that may be admitted, for a finite time; empty for all. No other may run then.

        It is empty if there are no requests, or all that wait are held. OutOfBlocks, with every request where it was,
        if others hold so much that not a single request fits.
        """
        if not tried:
            self._preempt_for_urgent()
        batch = self._planned(tried)
        while not len(batch) and self._windows.is_short:
            if not self._preempt_or_reclaim():
                raise OutOfBlocks(1, 0)
            batch = self._planned(tried, admits=False)  # a preempted one would take the same blocks again
        return batch

    def _planned(self, tried: Sequence[Request], admits: bool = True) -> Batch:
        """Return what fits now; in windows that are short, maybe nothing. admits: whether one that waits may run."""
        self._windows.begin()
        decodes = self._room_for_decodes()
        are_mixed = len(decodes.requests) < len(self.running)
        running = self.running if are_mixed else []
        prefilling = [request for request in running if request.num_computed < request.num_room]
        if decodes.requests:
            decodes.begin()
        portions: list[Portion] = []
        budget = self.max_num_batched_tokens - len(decodes.requests)
        later = [request for request in prefilling if self._is_less_urgent(request)]
        for request in prefilling:
            if request not in later:
                budget -= add_portion(portions, request, budget, self._windows)
        batch = Batch(decodes, portions)
        if admits and self.waiting and (budget or self._blocks.have_states) and len(self.running) < self.max_num_seqs:
            self._admit(batch, prefilling, tried)
        for request in later:
            add_portion(portions, request, self.max_num_batched_tokens - batch.num_tokens, self._windows)
        return batch

    def complete(self, batch: Batch) -> None:
        """Note that the batch's K and V are written, and commit them: full blocks become findable."""
        block_size = self._block_size
        decodes = batch.decodes
        if len(decodes):
            self.manager.rows.commit(decodes.rows, decodes.newest_tokens)
            decodes.set_computed()
        if self._windows.gives_back:
            self._windows.leave(decodes.that_filled(block_size))
        for request, _, end in batch.prefills:
            self._make_private(request)
            request.set_computed(end)
            has_filled = end // block_size > request.num_committed // block_size
            self._commit(request)
            self._blocks.keep_marks(request)
            if has_filled:
                self._windows.leave([request])

    def fork(self, request: Request, forks: list[Request]) -> None:
        """Run `forks` beside `request`, whose tokens have all been computed. One without room for its state waits."""
        self._commit(request)
        for fork in forks:
            try:
                self.manager.fork(request.seq_id, fork.seq_id)
            except OutOfBlocks:
                fork.join()
                self.add(fork)
            else:
                fork.join(request)
                self.running.append(fork)

    def requeue(self, requests: Iterable[Request]) -> None:
        """Put the requests of a failed batch that run back into the queue, to compute again all that is not cached."""
        for request in requests:
            if request in self.running:
                self.spoil(request)
                self._stop(request)
                self.add(request)

    def finish(self, request: Request) -> None:
        """Take a request out, wherever it is. Its committed tokens can still be found."""
        if request in self.running:
            self.keep_state(request)
            self._stop(request)
        else:
            self.waiting.remove(request)
            if self.manager.is_swapped(request.seq_id):
                self.manager.release(request.seq_id)

    def keep_state(self, request: Request, goes_on: bool = False) -> None:
        """Leave its state, after all that is committed, to others, or to itself. A second call does nothing."""
        if self._blocks.have_states and request.num_room:
            self._settle_state(request, goes_on)
            self._commit(request)
            self._blocks.keep_end(request, goes_on)

    def spoil(self, request: Request) -> None:
        """Note that a step has failed for a request that runs: its state is to be kept by nobody."""
        if request in self.running:
            self._blocks.spoil(request)

    @property
    def may_admit(self) -> bool:
        """Whether a request waits that the next step may let run."""
        return bool(self.waiting) and (len(self.running) < self.max_num_seqs or self.has_urgent)

    @property
    def keeps_states(self) -> bool:
        """Whether requests have states, which a step that is dropped has written all the same."""
        return self._blocks.have_states

    def forget_cached(self, request: Request) -> None:
        """Forget the cached blocks of a request, but for those that others use or share."""
        self.manager.space.drop(request.tokens[: request.num_tokens], request.namespace)

    def go_stale(self) -> int:
        """Let running requests that have tokens keep K and V of older weights, for themselves; return how many."""
        decoding = [request for request in self.running if request.num_generated and not request.scores_prompt]
        for request in decoding:
            self._commit(request)  # what is computed is of the older weights, and found as such
            self.manager.make_private(request.seq_id)
            request.go_stale()
        return len(decoding)

    def restart(self, keeps_stale: bool = False) -> None:
        """Put requests back into the queue without a block: all of their K and V are computed again.

        keeps_stale: whether those that `go_stale` has left their K and V run on.
        """
        self.requeue([request for request in self.running if not (keeps_stale and request.is_stale)])
        self.num_queued += 1
        for request in self.waiting:
            if self.manager.is_swapped(request.seq_id):
                self.manager.release(request.seq_id)

    def preempt_last(self) -> None:
        """Take the blocks of the running request that is last in order; it waits again. If that fails, it runs on."""
        last = max(self.running, key=attrgetter("order"))
        self.preemptions = self.preemptions.plus(is_swap=self._take_blocks(last))
        self.running.remove(last)
        self.num_left += 1
        self.add(last)

    # --- priorities --------------------------------------------------------------------------------------------------

    def _is_less_urgent(self, request: Request) -> bool:
        """Whether a running request comes after the first waiting one by its priority."""
        return bool(self.waiting) and self.waiting[0].group.priority < request.group.priority

    @property
    def has_urgent(self) -> bool:
        """Whether the first waiting request comes before a running one by its priority."""
        return self._has_priorities and any(self._is_less_urgent(request) for request in self.running)

    def _preempt_for_urgent(self) -> None:
        """Preempt running requests for the first waiting one, if they come after it by their priorities.

        Only as many as it needs are preempted. Its cached blocks are not counted, so that may be one too many.
        """
        while self.has_urgent:
            first = self.waiting[0]
            num_seqs = len(self.running) + 1 + first.num_forks_due
            num_blocks = self._blocks_for(first.num_tokens) + num_seqs - 1  # one for each other to go on
            waits = self._turns.holds(first) or self._turns.has_blocks(first)
            if waits or (num_seqs <= self.max_num_seqs and num_blocks <= self.manager.num_free_blocks):
                return
            self.preempt_last()

    # --- a request's blocks ------------------------------------------------------------------------------------------

    def _stop(self, request: Request) -> None:
        self.running.remove(request)
        self.num_left += 1
        self.manager.release(request.seq_id)
        request.leave_blocks()

    def _take_blocks(self, request: Request) -> bool:
        """Free a request's device blocks. Return whether its K and V go to the host; else they are computed again."""
        self._settle_state(request, goes_on=True)
        self._commit(request)
        must_begin_again = request.scores_prompt or request.is_stale
        is_swapped = not must_begin_again and self._blocks.swap_out(request)
        if not is_swapped:
            self.keep_state(request, goes_on=True)
            self.manager.release(request.seq_id)
        request.leave_blocks()
        return is_swapped

    def _settle_state(self, request: Request, goes_on: bool) -> None:
        """Make a state stand for what is committed, also where a step ahead has written it. The request leaves.

        The step has computed the newest token, so this is committed, too. A request that goes on computes its newest
        token again, and no state can go back by a token. So its state is given up, as one that the step has spoiled.
        """
        is_computed = self._outcome_ahead(request) if self._blocks.have_states else None
        if is_computed is None:
            return
        if is_computed and not goes_on and request.num_room == request.num_tokens:  # a failed one has no new token
            request.set_computed(request.num_tokens)
        else:
            self.spoil(request)

    def _commit(self, request: Request) -> None:
        self._blocks.commit(request)

    def _make_private(self, request: Request) -> None:
        """Commit only the tokens before the first reused one: they were computed exactly, those after it were not."""
        if request.blending is None or not request.reuse:
            return
        request.set_computed(request.blending.num_exact_tokens)
        self._commit(request)
        self.manager.make_private(request.seq_id)
        request.blending.end_prefill()

    def _room_for_decodes(self) -> Decodes:
        """Return the requests that decode, which have a slot for their newest tokens now."""
        while True:
            decodes = self._decoding()
            if not decodes.requests:
                return decodes
            try:
                self.manager.rows.append(decodes.rows)
                self._windows.open(decodes.requests)
                return decodes
            except OutOfBlocks:
                if not self._preempt_or_reclaim():
                    raise

    def _decoding(self) -> Decodes:
        """Return the running requests whose newest token has no slot yet: the same object while they stay the same."""
        requests = [request for request in self.running if request.num_room < request.num_tokens]
        del requests[self.max_num_batched_tokens :]
        if requests != self._decodes.requests:
            self._decodes = Decodes(requests, self.manager.rows.of([request.seq_id for request in requests]))
        return self._decodes

    # --- admission ---------------------------------------------------------------------------------------------------

    def _admit(self, batch: Batch, prefilling: Sequence[Request], tried: Sequence[Request]) -> None:
        """Let waiting requests run, as far as tokens, sequences and blocks go. prefilling: those that run already."""
        decoding = [] if self._blocks.have_states else batch.decodes.that_filled(self._block_size)
        prefills = Prefills(self._blocks, [*prefilling, *decoding])
        budget = self.max_num_batched_tokens - batch.num_tokens
        num_seqs = len(self.running) + sum([request.num_forks_due for request in prefilling])
        num_passed_over = 0
        for request in self._first_waiting(tried):
            num_more = 1 + request.num_forks_due
            num_most = max(num_seqs + num_more, num_passed_over)
            if self._windows.is_short or num_most > self.max_num_seqs or not (budget or self._blocks.have_states):
                break
            if self._is_passed_over(request, prefills):
                num_passed_over += 1
                num_seqs += self._turns.has_blocks(request) * num_more
                continue
            num_spare = num_seqs + num_more - 1 if num_seqs else 0
            if not budget or batch.is_too_full_for(request, budget):
                break
            waits = self._turns.begin(request, num_spare)
            while not waits and not self._allocate(request, num_spare):
                if num_seqs:
                    return
                self._reclaim(request)  # none runs, and nothing comes for a request before it
                waits = self._turns.begin(request, num_spare)  # what came too early for it may have room now
            num_seqs += num_more
            if waits:
                num_passed_over += 1
                continue
            budget -= min(add_portion(batch.prefills, request, budget, self._windows), budget)
            if not request.reuse:
                prefills.add(request)

    def _is_passed_over(self, request: Request, prefills: Prefills) -> bool:
        """Whether it does better to wait for something that comes. Loaded blocks need not wait for others."""
        if self._turns.holds(request):
            return True
        needs_all = request.scores_prompt or self._turns.has_blocks(request)
        return not needs_all and prefills.will_share(request)

    def _first_waiting(self, tried: Sequence[Request]) -> list[Request]:
        """Return the waiting requests that are looked at in one step, in order: never all of a long queue."""
        if tried:
            return [request for request in self.waiting if request in tried]
        return self.waiting[: 2 * self.max_num_seqs + 1]  # as many may be admitted, and as many and one passed over

    def _reclaim(self, request: Request) -> None:
        """Take blocks of those that hold some for no running request; OutOfBlocks if nobody does."""
        if not any(reclaim() for reclaim in self.reclaimers):
            raise OutOfBlocks(self._blocks_for(request.num_tokens), self.manager.num_free_blocks)

    def _preempt_or_reclaim(self) -> bool:
        """Preempt the running request that is last in order; where it is alone, reclaim blocks of others."""
        if len(self.running) > 1:
            self.preempt_last()
            return True
        return any(reclaim() for reclaim in self.reclaimers)

    def _allocate(self, request: Request, num_spare: int) -> bool:
        """Move a request from waiting to running; False if blocks are short.

        num_spare: blocks to leave over, one for each request that will run: else the next decodes would preempt the
        newcomer. A request with blocks of a load has left them when it got these.
        """
        tokens, space = request.tokens[: request.num_tokens], self.manager.space
        was_swapped, num_promoted = self.manager.is_swapped(request.seq_id), space.num_promoted_blocks
        if self._turns.has_blocks(request):
            self._turns.hand_over(request)
            num_spare = 0
        elif not self._windows.has_room(request):
            return False
        if not was_swapped and self._blocks.lacks_room(request, tokens, num_spare):
            return False  # before it is explained: else it would be at each step in which it waits
        explanation = self._explained(request)
        try:
            if was_swapped:
                allocation = self.manager.swap_in(request.seq_id, tokens, num_spare=num_spare)
            else:
                allocation = self._blocks.allocate(request, tokens, num_spare)
        except OutOfBlocks:
            return False
        self._turns.hand_over(request)
        request.group.note_loaded((space.num_promoted_blocks - num_promoted) * self._block_size)
        if request.admit(allocation.num_cached_tokens):
            self.num_prompt_tokens += request.num_prompt_tokens
            self.num_cached_tokens += allocation.num_cached_tokens
            request.group.explanation = explanation
        if request.blending is not None and not was_swapped:
            request.blending.admit(allocation.num_cached_tokens)
        self.waiting.remove(request)
        self.running.append(request)
        return True

    def _explained(self, request: Request) -> Explanation | None:
        """Return how far the cache reaches into a prompt before its first admission; None where nobody has asked."""
        if not self._explains or request.group.is_admitted or request.scores_prompt:
            return None
        return self.manager.explain(request.prompt, request.namespace, "none")

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

"""Scheduler: which tokens of which requests the next step computes. It owns the block manager; no tensors, no sampling.

    add ─► waiting ──admit──► running: prefill, in chunks ─► decode, a token a step ─► finish
              ▲                  │
              └────preempt───────┘   blocks lacked: the youngest gives its own back (to the host, or for good)

Both lists serve the first come first; `waiting` is kept in order of arrival, also for those that come back.

Every request finishes. `add` refuses what does not fit into all blocks together. A step gives its tokens to the
decoding requests first, and admits nothing before every running request has got what it wants; so a running prefill
waits at most for a finite number of decodes. Only the youngest running request is preempted, hence never the oldest
while another runs, and alone it cannot lack blocks: all others are free or evictable. So the oldest running request
gets to its end, then the next one; of the samples of one prompt, each a request from its first token on, the first
counts as the oldest. The oldest waiting request is passed over only while another's prefill computes
blocks that it will share, and that prefill ends or is preempted, or while what it needs is on its way from a store,
which has a deadline; with nothing running it is admitted, for everything is free, or held by somebody who is no request
(`Branches`): then the reclaimers are asked to give it back, and if that is not enough, `schedule` raises OutOfBlocks.
"""

from bisect import insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from kvpage.blocks.manager import BlockManager
from kvpage.checks.errors import OutOfBlocks
from kvpage.serving.requests import Request


class Chunk(NamedTuple):
    """The tokens [start, end) of a request, to be computed in one step."""

    request: Request
    start: int
    end: int

    @property
    def is_last(self) -> bool:
        """Its last row's logits give the request's next token."""
        return self.end == self.request.num_tokens


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step computes, once the manager's moves are done: decodes first, then prefills."""

    chunks: list[Chunk]

    @property
    def num_tokens(self) -> int:
        return sum(chunk.end - chunk.start for chunk in self.chunks)


class Scheduler:
    """Requests in two lists, their blocks in `manager`. A batch ends in `complete`, and where it fails in `requeue`.

    window: of the attention of all layers; None if one of them sees everything.
    """

    def __init__(
        self, manager: BlockManager, max_num_seqs: int, max_num_batched_tokens: int, window: int | None = None
    ) -> None:
        for name, value in (("max_num_seqs", max_num_seqs), ("max_num_batched_tokens", max_num_batched_tokens)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        self.manager = manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.window = window
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.reclaimers: list[Callable[[], bool]] = []
        """Each gives back some blocks that it holds for no request; False if it cannot."""
        self.is_held: Callable[[Request], bool] = lambda request: False
        """Whether a waiting request is to be passed over for now; for a finite time."""
        self.tried: list[Request] = []
        """The only ones that are admitted, for a finite time; empty for all. Nobody else must run then."""
        self.num_preemptions = 0
        self.num_swaps = 0  # preemptions that kept on the host what was computed
        self.num_prompt_tokens = self.num_cached_tokens = 0  # at first admissions

    def add(self, request: Request) -> None:
        """Queues a request. ValueError if it would not fit even if it had all blocks, or all places, for itself."""
        if request.params.n > self.max_num_seqs:
            raise ValueError(f"n must be at most max_num_seqs={self.max_num_seqs}, got {request.params.n}")
        needed = -(-request.max_written_tokens // self.manager.block_size)
        if needed > self.manager.num_blocks:
            raise ValueError(
                f"prompt and max_tokens must fit into {self.manager.num_blocks} blocks of "
                f"{self.manager.block_size} tokens, got {request.num_prompt_tokens} + {request.params.max_tokens} "
                f"tokens, {needed} blocks"
            )
        self._queue(request)

    def schedule(self) -> Batch:
        """The next step. The blocks of its chunks are allocated; empty only if there are no requests.

        OutOfBlocks, with every request where it was, if what others hold leaves too few for a single one. Empty, too,
        while all that wait are held.
        """
        decodes = self._room_for_decodes()
        prefills = [request for request in self.running if request.num_computed < request.num_room]
        chunks: list[Chunk] = []
        budget = self.max_num_batched_tokens
        for request in decodes:
            request.num_room += 1
        for request in decodes + prefills:
            budget -= _add_chunk(chunks, request, budget)
        self._admit(chunks, budget)
        return Batch(chunks)

    def complete(self, batch: Batch) -> None:
        """The batch's K and V are written: its full blocks become findable.

        Tokens of a block that is not full yet are committed with it; until then nobody could find them anyway.
        """
        block_size = self.manager.block_size
        for request, _, end in batch.chunks:
            if request.reuse:
                self._make_private(request)
            request.num_computed = end
            if end // block_size > request.num_committed // block_size:
                self._commit(request)
                self._leave_window(request)

    def fork(self, request: Request, forks: list[Request]) -> None:
        """`forks` run from now on beside `request`, whose tokens have all been computed; nothing is copied yet."""
        self._commit(request)
        for fork in forks:
            self.manager.fork(request.seq_id, fork.seq_id)
            fork.num_computed = fork.num_committed = request.num_computed
            fork.num_room = request.num_room
        self.running += forks
        request.samples += forks

    def requeue(self, requests: Iterable[Request]) -> None:
        """A batch was not computed, or came to nothing: those of its requests that run go back to the queue, to compute
        again what is not cached.
        """
        for request in requests:
            if request in self.running:
                self._stop(request)
                self._queue(request)

    def finish(self, request: Request) -> None:
        """Takes a request out, wherever it is. What it has committed stays findable."""
        if request in self.running:
            self._stop(request)
        else:
            self.waiting.remove(request)
            if self.manager.is_swapped(request.seq_id):
                self.manager.release(request.seq_id)

    def restart(self) -> None:
        """Every request goes back to the queue without a block: all of its K and V are computed again."""
        self.requeue(self.running[:])
        for request in self.waiting:
            if self.manager.is_swapped(request.seq_id):
                self.manager.release(request.seq_id)

    def _queue(self, request: Request) -> None:
        insort(self.waiting, request, key=_arrival)

    def _stop(self, request: Request) -> None:
        self.running.remove(request)
        self.manager.release(request.seq_id)
        request.num_computed = request.num_committed = request.num_room = 0
        request.reuse = []

    def preempt_youngest(self) -> None:
        """Takes the blocks of the request that runs and arrived last; it waits for its turn again. If that fails, it
        runs as before.
        """
        youngest = max(self.running, key=_arrival)
        self._give_back(youngest)
        self.num_preemptions += 1
        self.running.remove(youngest)
        self._queue(youngest)

    def _give_back(self, request: Request) -> None:
        """Frees its device blocks: what it has computed goes to the host, if there is room, or is computed again."""
        self._commit(request)
        try:
            self.manager.swap_out(request.seq_id)
        except OutOfBlocks:
            self.manager.release(request.seq_id)
        else:
            self.num_swaps += 1
        request.num_computed = request.num_committed = request.num_room = 0

    def _commit(self, request: Request) -> None:
        self.manager.commit(request.seq_id, request.tokens[request.num_committed : request.num_computed])
        request.num_committed = request.num_computed

    def _make_private(self, request: Request) -> None:
        """What stands before the first reused token was computed exactly, and nothing behind it."""
        request.num_computed = request.reuse[0].start
        self._commit(request)
        self.manager.make_private(request.seq_id)
        request.reuse, request.reusable = [], None

    def _leave_window(self, request: Request) -> None:
        """Gives back the blocks that no later token looks at: position p attends from p - window + 1 on."""
        if self.window is not None:
            self.manager.release_before(request.seq_id, max(request.num_committed - self.window + 1, 0))

    def _room_for_decodes(self) -> list[Request]:
        while True:
            decodes = [request for request in self.running if request.needs_room][: self.max_num_batched_tokens]
            if not decodes:
                return decodes
            try:
                self.manager.append([request.seq_id for request in decodes], 1)
                return decodes
            except OutOfBlocks:
                if len(self.running) > 1:
                    self.preempt_youngest()
                elif not self._reclaim():
                    raise

    def _admit(self, chunks: list[Chunk], budget: int) -> None:
        """Lets waiting requests run, as far as tokens, sequences and blocks go."""
        if not self.waiting or not budget:
            return
        prefills = _Prefills(self.manager, self.running)
        num_passed_over = 0
        for request in [one for one in self.waiting if one in self.tried] if self.tried else self.waiting[:]:
            num_seqs = self._num_seqs() + 1 + request.num_forks_due
            if not budget or num_seqs > self.max_num_seqs or num_passed_over > self.max_num_seqs:
                break
            if self.is_held(request) or prefills.will_share(request):
                num_passed_over += 1
                continue
            if (
                request.reusable
                and request.num_tokens > budget
                and any(chunk.end - chunk.start > 1 for chunk in chunks)
            ):
                break  # it is not computed in chunks: with the next step's decodes, beside no other prefill
            if not self._allocate(request):
                if not self.running:
                    self._allocate_by_reclaiming(request)
                else:
                    break
            budget -= min(_add_chunk(chunks, request, budget), budget)
            if not request.reuse:
                prefills.add(request)

    def _reclaim(self) -> bool:
        return any(reclaim() for reclaim in self.reclaimers)

    def _allocate_by_reclaiming(self, request: Request) -> None:
        """With nothing running: all blocks are free but for what others hold. OutOfBlocks if that is too much."""
        while not self._allocate(request):
            if not self._reclaim():
                needed = -(-request.num_tokens // self.manager.block_size)
                raise OutOfBlocks(needed, self.manager.num_free_blocks)

    def _num_seqs(self) -> int:
        """That run, or will as soon as their prompts are computed."""
        return sum(1 + request.num_forks_due for request in self.running)

    def _allocate(self, request: Request) -> bool:
        """Moves a request from waiting to running; False if blocks lack.

        One block for each request that will run is left over: else the next decodes would preempt what was just
        admitted.
        """
        num_spare = self._num_seqs() + request.num_forks_due if self.running else 0
        tokens = request.tokens[: request.num_tokens]
        was_swapped = self.manager.is_swapped(request.seq_id)
        try:
            if was_swapped:
                given = self.manager.swap_in(request.seq_id, tokens)
            else:
                given = self.manager.allocate(request.seq_id, tokens, request.namespace, request.params.priority)
        except OutOfBlocks:
            return False
        if self.manager.num_free_blocks < num_spare:
            self._refuse(request, was_swapped)
            return False
        request.num_computed = request.num_committed = given.num_cached_tokens
        request.num_room = len(tokens)
        request.reuse = [] if was_swapped else request.reuse_from(request.num_computed)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = given.num_cached_tokens
            self.num_prompt_tokens += request.num_prompt_tokens
            self.num_cached_tokens += given.num_cached_tokens
        self.waiting.remove(request)
        self.running.append(request)
        return True

    def _refuse(self, request: Request, was_swapped: bool) -> None:
        """Takes back what a waiting request has just been given."""
        if not was_swapped:
            self.manager.release(request.seq_id)
            return
        try:
            self._give_back(request)
        except BaseException:
            self.manager.release(request.seq_id)
            raise


class _Prefills:
    """Running requests whose prompts are not computed yet, found by their first block.

    A waiting request that shares blocks with one of them is better off to wait until these are committed: of many
    requests with a common prefix that arrive together, the first computes it and the others find it.
    """

    def __init__(self, manager: BlockManager, running: list[Request]) -> None:
        self._block_size = manager.block_size
        self._enabled = manager.enable_prefix_caching
        self._by_first_block: dict[tuple[bytes, bytes], list[Request]] = {}
        for request in running:
            self.add(request)

    def add(self, request: Request) -> None:
        if self._enabled and self._whole_blocks(request.num_room) > request.num_computed:
            self._by_first_block.setdefault(self._key(request), []).append(request)

    def will_share(self, request: Request) -> bool:
        """One of them has yet to compute a whole block that `request` begins with too."""
        if request.num_tokens <= self._block_size:
            return False
        others = self._by_first_block.get(self._key(request), ())
        return any(self._num_shared(request, other) > other.num_computed for other in others)

    def _num_shared(self, request: Request, other: Request) -> int:
        length = min(request.num_tokens - 1, other.num_room)
        differ = request.tokens[:length] != other.tokens[:length]
        num_equal = int(differ.argmax()) if differ.any() else length
        return self._whole_blocks(num_equal)

    def _whole_blocks(self, num_tokens: int) -> int:
        return num_tokens // self._block_size * self._block_size

    def _key(self, request: Request) -> tuple[bytes, bytes]:
        return request.namespace, request.tokens[: self._block_size].tobytes()


def _add_chunk(chunks: list[Chunk], request: Request, budget: int) -> int:
    """Adds as many of the request's next tokens as the budget allows, or all if it blends; returns how many."""
    num_left = request.num_room - request.num_computed
    num_tokens = num_left if request.reuse else min(budget, num_left)
    if num_tokens:
        chunks.append(Chunk(request, request.num_computed, request.num_computed + num_tokens))
    return num_tokens


def _arrival(request: Request) -> tuple[int, int]:
    return request.arrival, request.sample_index

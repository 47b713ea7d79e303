"""ServingLoop: requests to tokens, a batch a step.

    add ─► Scheduler.schedule ─► PieceRunner.run ─► sample ─► Scheduler.complete ─► StepOutput, to the request's sink
                blocks              K, V, logits      tokens      blocks findable

A request whose logits are no numbers ends there, and its blocks never become findable. A step that raises is computed
once more; if it raises again, Suspects finds the requests that do it, and these end.

Everything happens inside `step` and `compute`: between two of them the caller's model is its own.
"""

import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from kvpage.checks.fork_guard import ForkGuard
from kvpage.checks.interrupts import HeldInterrupts, interruptible, uninterrupted
from kvpage.observe.telemetry import Telemetry
from kvpage.serving.loop.chosen_tokens import ChosenTokens, choose_tokens
from kvpage.serving.loop.links import Links
from kvpage.serving.loop.piece_runner import PieceRunner
from kvpage.serving.loop.scheduler import Batch, Chunk, Scheduler
from kvpage.serving.loop.suspects import Suspects
from kvpage.serving.model.step import Piece
from kvpage.serving.requests import Request, RequestOutput, StepOutput

logger = logging.getLogger(__name__)


class ServingLoop:
    """The unfinished requests, by id, and what is done for them. For one thread.

    outputs: of requests without a sink, until somebody takes them. num_arrivals, num_finished, num_generated_tokens: so
    far.
    """

    def __init__(self, pieces: PieceRunner, scheduler: Scheduler, links: Links, telemetry: Telemetry) -> None:
        self.pieces, self.scheduler, self.links, self.telemetry = pieces, scheduler, links, telemetry
        self.requests: dict[str, Request] = {}
        self.outputs: list[StepOutput] = []
        self.num_arrivals = self.num_finished = self.num_generated_tokens = 0
        self._dropped: deque[Request] = deque()  # by their callers during a step, by the garbage collector at any time
        self._is_stepping = False
        self._process = ForkGuard("the engine")
        self._suspects = Suspects()
        scheduler.is_held = links.holds

    def new_id(self) -> str:
        """One that no unfinished request has."""
        number = self.num_arrivals
        while f"request-{number}" in self.requests:
            number += 1
        return f"request-{number}"

    @uninterrupted
    def add(self, request: Request) -> None:
        """Queues it; its `arrival` is the number of those before it. What Scheduler.add raises changes nothing."""
        self.scheduler.add(request)
        self.requests[request.request_id] = request
        self.num_arrivals += 1

    @uninterrupted
    def abort(self, request: Request) -> RequestOutput:
        """Ends an unfinished one now; what came of it. RuntimeError during a step."""
        if self._is_stepping:
            raise RuntimeError(f"abort must not be called during a step, got request {request.request_id!r}")
        del self.requests[request.request_id]
        for one in request.samples:
            if one.finish_reason is None:
                self._end(one)
                one.finish_reason = "abort"
        self.num_finished += 1
        request.is_aborted = True
        return request.output()

    def drop(self, *requests: Request) -> None:
        """Aborts those of them that have not finished, for whom nobody waits any more; during a step, when that is
        over.
        """
        self._dropped += requests
        if not self._is_stepping:
            self._abort_dropped()

    def forget(self, request: Request) -> None:
        """What `drop` does, by the time anybody looks: for the garbage collector, which runs amid anything, on any
        thread.
        """
        self._dropped.append(request)

    @property
    def has_unfinished(self) -> bool:
        if self._dropped and not self._is_stepping:
            self._abort_dropped()
        return bool(self.requests or self.outputs)

    def step(self) -> None:
        """Computes one batch. What raises in it raises here the first time; its requests are back in the queue then,
        and nothing of it is cached. What raises again ends the requests that raise alone. RuntimeError within another
        step, as of a hook of the model.
        """
        failure = self._try_batch()
        if failure is not None:
            raise failure

    def step_until(self, sink: deque[StepOutput], requests: Sequence[Request]) -> None:
        """Steps until something is in the sink. What raises the first time is logged, and tried once more.
        RuntimeError if one of its requests was aborted by somebody else.
        """
        while not sink:
            for request in requests:
                if request.is_aborted:
                    raise RuntimeError(f"request {request.request_id!r} was aborted")
            failure = self._try_batch()
            if failure is not None:
                logger.warning("a step raised, and its requests are computed once more", exc_info=failure)

    @uninterrupted
    def restart(self) -> None:
        """Every request computes all of its K and V again, from no segment that was found; its tokens stay."""
        self._abort_dropped()
        self.scheduler.restart()
        self.links.forget_found(self.scheduler.waiting)

    def check_between_steps(self, call: str) -> None:
        """RuntimeError, with the call's name, during a step, and in a forked process."""
        self._process.check()
        if self._is_stepping:
            raise RuntimeError(f"{call} must not be called during a step")

    def compute(self, pieces: Sequence[Piece]) -> torch.Tensor:
        """Pieces of sequences that are nobody's requests: the logits of the wanted tokens."""
        with self._step():
            return self.pieces.run(pieces).logits

    # --- inside ------------------------------------------------------------------------------------------------------

    @contextmanager
    def _step(self) -> Iterator[None]:
        """Inside, requests leave the scheduler only as the step itself wants; what else came up is done after it.
        Ctrl-C is raised after it, too, but for one that comes while the model computes.
        """
        self._process.check()
        if self._is_stepping:
            raise RuntimeError("a step must not begin before the one under way has ended")
        with HeldInterrupts():
            self._abort_dropped()
            self._is_stepping = True
            try:
                yield
            finally:
                self._is_stepping = False
                self._abort_dropped()
                self.telemetry.tell()

    @uninterrupted
    def _abort_dropped(self) -> None:
        while self._dropped:
            request = self._dropped.popleft()
            if self.requests.get(request.request_id) is request:
                self.abort(request)

    def _try_batch(self) -> Exception | None:
        """What a batch has raised, where that is worth a second try."""
        with self._step():
            if self.requests:
                self.pieces.check()
            return self._compute_batch()

    def _compute_batch(self) -> Exception | None:
        batch = self._schedule()
        if not batch.chunks:
            return None
        begin, untaken = time.monotonic(), [chunk.request for chunk in batch.chunks]
        try:
            chosen = choose_tokens(batch, self._run(batch))
            now = time.monotonic()
            self._saw(batch, now - begin)
            untaken += chosen.new_requests
            self._complete(chosen)
            untaken = [*chosen.failed, *chosen.requests[::-1]]
            for request, token in zip(chosen.requests, chosen.token_ids, strict=True):
                self._take_token(request, token, now)
                untaken.pop()
            for request in chosen.failed:
                self._fail(request, f"the logits after {request.num_tokens} tokens are no finite numbers")
        except BaseException as error:  # an interrupt too must leave no request without its blocks, or its next token
            for request in untaken:
                request.take_back()
            self.scheduler.requeue(untaken)
            if not isinstance(error, Exception):
                raise
            return self._blame([request for request in untaken if request in self.scheduler.waiting], error)
        return None

    def _blame(self, requests: Sequence[Request], error: Exception) -> Exception | None:
        """Their step has raised; they are back in the queue. The error, if that was the first time."""
        if not requests or self._suspects.blame(requests):
            return error
        culprit = self._suspects.narrow(requests)
        if culprit is not None:
            self._fail(culprit, f"{type(error).__name__}: {error}")
        return None

    def _schedule(self) -> Batch:
        self.scheduler.tried = tried = self._suspects.group
        if tried:  # nobody else may hold blocks, or have a part in what goes wrong
            self.scheduler.requeue([request for request in self.scheduler.running if request not in tried])
        while True:
            self.links.ask(self.scheduler.waiting)
            batch = self.scheduler.schedule()
            if batch.chunks or not self.scheduler.waiting:
                return batch
            with interruptible():
                self.links.wait()

    def _run(self, batch: Batch) -> torch.Tensor:
        """The logits after each chunk: [len(batch.chunks), vocab_size]."""
        computed = self.pieces.run([_piece(chunk) for chunk in batch.chunks])
        for chunk, counts in zip(batch.chunks, computed.blended, strict=False):
            if chunk.request.reuse:
                assert self.links.blend is not None
                self.links.blend.blended(chunk.request, counts)
        return computed.logits

    def _saw(self, batch: Batch, seconds: float) -> None:
        is_prefill = batch.num_tokens >= 4 * len(batch.chunks)  # mostly
        if not is_prefill or any(chunk.request.reuse for chunk in batch.chunks):
            return
        self.links.saw_prefill(batch.num_tokens, seconds)
        if rule := self.scheduler.manager.space.rule:
            rule.saw_prefill(batch.num_tokens, seconds)

    def _complete(self, chosen: ChosenTokens) -> None:
        self.links.keep(chosen.due)
        self.scheduler.complete(chosen.batch)
        for request, each in chosen.forks.items():
            self.scheduler.fork(request, each)
        self.links.save(chosen.due)

    def _take_token(self, request: Request, token: int, now: float) -> None:
        self.num_generated_tokens += 1
        if request.append(token, now):
            self.links.save_generated(request)
            self._end(request)
        self._suspects.clear(request)
        self._tell(request, token)

    def _fail(self, request: Request, reason: str) -> None:
        """Ends it. What of it is cached is forgotten, but for what others use or share."""
        request.finish_reason, request.error = "error", reason
        self._end(request)
        self.scheduler.manager.space.drop(request.tokens[: request.num_tokens], request.namespace)
        self._tell(request, None)

    def _tell(self, request: Request, token: int | None) -> None:
        """Its new token, or its end without one, goes to its caller."""
        output = None
        if request.first.is_over:
            del self.requests[request.request_id]
            self.num_finished += 1
            output = request.first.output()
        sink = self.outputs if request.sink is None else request.sink
        about = request.sample_index, request.finish_reason, output, request.error
        sink.append(StepOutput(request.request_id, token, *about))

    def _end(self, request: Request) -> None:
        self._suspects.clear(request)
        self.scheduler.finish(request)
        self.links.forget(request)


def _piece(chunk: Chunk) -> Piece:
    """Its last row is always wanted: K and V that come to no numbers are not committed."""
    request, start, end = chunk
    return Piece(request.seq_id, request.tokens[start:end], start, end, [end - start - 1], request.reuse)

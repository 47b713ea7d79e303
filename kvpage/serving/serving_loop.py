"""ServingLoop: requests to tokens, a batch a step.

    add ─► Scheduler.schedule ─► PieceRunner.run ─► sample ─► Scheduler.complete ─► StepOutput, to the request's sink
                blocks              K, V, logits      tokens      blocks findable

Everything happens inside `step` and `compute`: between two of them the caller's model is its own.
"""

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from kvpage.interrupts import HeldInterrupts, interruptible, uninterrupted
from kvpage.own_process import OwnProcess
from kvpage.serving.links import Links
from kvpage.serving.piece_runner import PieceRunner
from kvpage.serving.requests import Request, RequestOutput, StepOutput
from kvpage.serving.sampler import sample
from kvpage.serving.scheduler import Batch, Scheduler
from kvpage.serving.step import Piece
from kvpage.telemetry import Telemetry


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
        self._process = OwnProcess("the engine")
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
        """Computes one batch. If the model raises, its requests are back in the queue, and nothing of it is cached.
        RuntimeError within another step, as of a hook of the model.
        """
        with self._step():
            self._compute_batch()

    def step_until(self, sink: deque[StepOutput], requests: Sequence[Request]) -> None:
        """Steps until something is in the sink. RuntimeError if one of its requests was aborted by somebody else."""
        while not sink:
            for request in requests:
                if request.is_aborted:
                    raise RuntimeError(f"request {request.request_id!r} was aborted")
            self.step()

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

    def _compute_batch(self) -> None:
        batch = self._schedule()
        if not batch.chunks:
            return
        due = [chunk.request for chunk in batch.chunks if chunk.is_last]
        forks = {request: request.forks() for request in due if request.num_forks_due}
        sampled = due + [fork for each in forks.values() for fork in each]
        begin, untaken = time.monotonic(), [*(chunk.request for chunk in batch.chunks), *sampled[len(due) :]]
        try:
            tokens = sample(_with_forks(self._run(batch), due, forks), sampled)
            now = time.monotonic()
            self._saw(batch, now - begin)
            self._complete(batch, due, forks)
            untaken = sampled[::-1]
            for request, token in zip(sampled, tokens, strict=True):
                self._take_token(request, token, now)
                untaken.pop()
        except BaseException:  # an interrupt too must leave no request without its blocks, or without its next token
            for request in untaken:
                request.take_back()
            self.scheduler.requeue(untaken)
            raise

    def _schedule(self) -> Batch:
        while True:
            self.links.ask(self.scheduler.waiting)
            batch = self.scheduler.schedule()
            if batch.chunks or not self.scheduler.waiting:
                return batch
            with interruptible():
                self.links.wait()

    def _run(self, batch: Batch) -> torch.Tensor:
        """The logits of the next token of each request whose chunk is its last."""
        computed = self.pieces.run([_piece(*chunk, chunk.is_last) for chunk in batch.chunks])
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

    def _complete(self, batch: Batch, due: list[Request], forks: Mapping[Request, list[Request]]) -> None:
        self.links.keep(due)
        self.scheduler.complete(batch)
        for request, each in forks.items():
            self.scheduler.fork(request, each)
        self.links.save(due)

    def _take_token(self, request: Request, token: int, now: float) -> None:
        self.num_generated_tokens += 1
        output, finish_reason = None, request.append(token, now)
        if finish_reason:
            self.links.save_generated(request)
            self._end(request)
        if request.first.is_over:
            del self.requests[request.request_id]
            self.num_finished += 1
            output = request.first.output()
        sink = self.outputs if request.sink is None else request.sink
        sink.append(StepOutput(request.request_id, token, request.sample_index, finish_reason, output))

    def _end(self, request: Request) -> None:
        self.scheduler.finish(request)
        self.links.forget(request)


def _piece(request: Request, start: int, end: int, is_last: bool) -> Piece:
    wanted = [end - start - 1] if is_last else []
    return Piece(request.seq_id, request.tokens[start:end], start, end, wanted, request.reuse)


def _with_forks(
    logits: torch.Tensor, requests: Sequence[Request], forks: Mapping[Request, Sequence[Request]]
) -> torch.Tensor:
    """A row for each request, then one for each of its forks: [len(requests) + number of forks, vocab_size]."""
    if not forks:
        return logits
    rows = {request: row for row, request in enumerate(requests)}
    return logits[list(rows.values()) + [rows[request] for request, each in forks.items() for _ in each]]

"""ServingLoop: requests to tokens, a batch a step.

    add ─► Scheduler.schedule ─► BatchRunner.run ─► sample ─► Scheduler.complete ─► StepOutput, to the request's sink
                blocks              K, V, logits      tokens      blocks findable

A request whose logits are no numbers ends there, and its blocks never become findable. A step that raises is computed
once more. If it raises again, Suspects finds the requests that cause it, and these end.

Everything happens inside `step` and `compute`: between two of them the caller's model is its own.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Protocol

import torch

from kvpage.blocks.load_or_compute import LoadOrCompute
from kvpage.checks.fork_guard import ForkGuard
from kvpage.checks.interrupts import HeldInterrupts, interruptible, uninterrupted
from kvpage.checks.thread_guard import ThreadGuard
from kvpage.checks.wait_limit import WaitLimit
from kvpage.observe.telemetry import Telemetry
from kvpage.serving.loop.batch.batch import Batch
from kvpage.serving.loop.batch.batch_runner import BatchRunner
from kvpage.serving.loop.batch.chosen_tokens import ChosenTokens, choose_tokens, chosen_of_decodes, take_prompt_logprobs
from kvpage.serving.loop.batch.device_decoder import DeviceDecoder
from kvpage.serving.loop.batch.suspects import Suspects
from kvpage.serving.loop.connectors import Connectors
from kvpage.serving.loop.outputs import RequestOutput, StepOutput
from kvpage.serving.loop.ranks.rank_lost import RankLost
from kvpage.serving.loop.request import Entry, Request
from kvpage.serving.loop.scheduler import Scheduler
from kvpage.serving.model.step import BatchItem
from kvpage.serving.text.token_logprobs import TokenLogprobs
from kvpage.serving.weights.engine_weights import EngineWeights

logger = logging.getLogger(__name__)


class Keeper(Protocol):
    """What has work to do at some time between requests. next_due: seconds of time.monotonic(); infinite for never."""

    next_due: float

    def tend(self) -> None:
        """Do what is due."""


class ServingLoop:
    """The unfinished requests, by id, and the steps that compute them. For one thread.

    rule: learns how fast prefills are; None if nothing asks.
    weights: name the namespaces of requests.
    num_arrivals, num_finished, num_generated_tokens: so far.
    keeper: what steps do besides, when it is due; None for nothing.
    """

    def __init__(
        self,
        batch_runner: BatchRunner,
        scheduler: Scheduler,
        connectors: Connectors,
        telemetry: Telemetry,
        weights: EngineWeights,
        rule: LoadOrCompute | None = None,
    ) -> None:
        self.requests: dict[str, Request] = {}
        self.num_arrivals = self.num_finished = self.num_generated_tokens = 0
        self._batch_runner, self._scheduler, self._connectors = batch_runner, scheduler, connectors
        self._telemetry, self._weights, self._rule = telemetry, weights, rule
        self._look_at_weights: Callable[[bool], None] = lambda may_admit: None
        self._due: tuple[Future[None], Callable[[], None]] | None = None  # once requests that have begun have ended
        self._outputs: list[StepOutput] = []  # of requests without a sink, until they are taken
        self._dropped: deque[Request] = deque()  # by their callers during a step, by the garbage collector at any time
        self._is_stepping = False
        self._process = ForkGuard("the engine")
        self.thread = ThreadGuard("the engine")
        self._suspects = Suspects()
        self.decoder: DeviceDecoder | None = None
        self._limit: Callable[[], WaitLimit] | None = None
        self.keeper: Keeper | None = None

    def limit_waits(self, limit: Callable[[], WaitLimit] | None) -> None:
        """Have steps that only wait, as for a store, end early from now on. None: they wait for what they need."""
        self._limit = limit

    def keep(self, keeper: Keeper) -> None:
        """Do its work from now on, at the beginning of steps."""
        self.keeper = keeper

    @property
    def next_due(self) -> float:
        """Seconds of time.monotonic() at which `tend` has something to do."""
        return float("inf") if self.keeper is None else self.keeper.next_due

    def tend(self) -> None:
        """Do what is due between requests: every step does."""
        if self.keeper is not None:
            with self._stepping():
                self.keeper.tend()

    def use_decoder(self, decoder: DeviceDecoder) -> None:
        """Have decodes computed by it from now on, as far as it takes them."""
        self.decoder = decoder
        self._scheduler.use_outcomes(decoder.has_computed)

    def watch_weights(self, look: Callable[[bool], None]) -> None:
        """Have this called before each step: with whether a prompt may be admitted. It may raise, or `restart`."""
        self._look_at_weights = look

    def new_id(self) -> str:
        """Return an id that no unfinished request has."""
        number = self.num_arrivals
        while f"request-{number}" in self.requests:
            number += 1
        return f"request-{number}"

    def add(self, request: Request) -> None:
        """Queue it; its arrival is the number of requests before it. The caller holds interrupts back.

        ValueError, and no change, if its id is in use, Scheduler.check refuses it, or its adapter is not loaded.
        """
        self.thread.check()
        if request.request_id in self.requests:
            raise ValueError(f"request_id must not be in use, {request.request_id!r} is")
        self._scheduler.check(request)
        request.enter(*self._weights.entry(request.own_namespace, request.params.adapter))
        request.group.arrival = self.num_arrivals
        self._scheduler.add(request)
        self.requests[request.request_id] = request
        self.num_arrivals += 1

    @uninterrupted
    def abort(self, request: Request) -> RequestOutput:
        """End an unfinished request now; return its outcome. RuntimeError during a step."""
        self.thread.check()
        if self._is_stepping:
            raise RuntimeError(f"abort must not be called during a step, got request {request.request_id!r}")
        del self.requests[request.request_id]
        for sample in request.group.samples:
            if sample.finish_reason is None:
                self._end(sample)
                sample.end("abort")
        self.num_finished += 1
        request.group.abort()
        output = request.output()
        request.group.let_go()
        return output

    def drop(self, *requests: Request) -> None:
        """Abort those of them that have not finished, and that no caller waits for; during a step, after it."""
        self._dropped += requests
        if not self._is_stepping and self.thread.is_mine:
            self._abort_dropped()

    def forget(self, request: Request) -> None:
        """Drop a request later: for the garbage collector, which runs amid anything, on any thread."""
        self._dropped.append(request)

    @property
    def num_waiting(self) -> int:
        """How many requests wait. Any thread may ask."""
        return len(self._scheduler.waiting)

    @property
    def has_unfinished(self) -> bool:
        """Whether there are requests to compute, or outputs to take."""
        if self._dropped and not self._is_stepping and self.thread.is_mine:
            self._abort_dropped()
        return bool(self.requests or self._outputs)

    def step(self) -> list[StepOutput]:
        """Compute one batch; return the outputs of requests without a sink, those of other steps included.

        An exception comes through the first time; its requests are back in the queue then, and nothing of it is cached.
        If they raise again, the requests that raise alone end. RuntimeError within another step, as of a hook of the
        model.
        """
        failure = self.try_step()
        if failure is not None:
            raise failure
        outputs, self._outputs = self._outputs, []
        return outputs

    def try_step(self) -> Exception | None:
        """Compute one batch; return its exception if that is worth a second try. Its outputs stay where they are."""
        self.do_due()  # what has begun may have ended by other things than steps
        failure = None
        with HeldInterrupts():  # as `_stepping`, whose generator would cost each step a microsecond
            self._begin_step()
            try:
                if self.keeper is not None:
                    self.keeper.tend()
                if self.requests:
                    self._batch_runner.check()
                    self._look_at_weights(self._scheduler.may_admit)
                batch = self._next_batch()
                untaken = batch.requests
                try:
                    try:
                        if len(batch):
                            self._take_batch(batch, untaken)
                    finally:
                        self._connectors.end_step()
                except BaseException as error:  # an interrupt too must leave no request without its blocks, or a token
                    requests = self._put_back(untaken)
                    if isinstance(error, RankLost) or not isinstance(error, Exception):
                        raise  # from here: a call that raised it would hold it, and its frames, in a cycle
                    failure = self._blame(requests, error)
            finally:
                self._end_step()
        self.do_due()
        return failure

    def step_until(self, sink: deque[StepOutput], requests: Sequence[Request]) -> None:
        """Step until something is in the sink. The first exception of a batch is logged, and the batch is tried again.

        RuntimeError if one of the requests was aborted by another caller.
        """
        while not sink:
            for request in requests:
                if request.group.is_aborted:
                    raise RuntimeError(f"request {request.request_id!r} was aborted")
            failure = self.try_step()
            if failure is not None:
                logger.warning("a step raised, and its requests are computed once more", exc_info=failure)

    @property
    def num_begun(self) -> int:
        """Unfinished requests that have had blocks."""
        return len(self._begun())

    def _begun(self) -> list[Request]:
        scheduler = self._scheduler
        return [*scheduler.running, *(request for request in scheduler.waiting if request.group.is_admitted)]

    @property
    def is_due_later(self) -> bool:
        """Whether there is work of `finish_then`, which nobody has withdrawn."""
        if self._due is not None and self._due[0].done():
            self._due = None
        return self._due is not None

    def finish_then(self, work: Callable[[], None], future: "Future[None]") -> None:
        """Do work once all requests that have begun have ended; until then no other one begins.

        future: the work's. Any thread may cancel it, and nothing is done then.
        """
        assert not self.is_due_later, "one work at a time"
        self._due = future, work

    def withdraw(self, reason: str) -> None:
        """Forget the work of `finish_then`; whoever waits for its future gets a RuntimeError of the reason."""
        if self._due is not None:
            (future, _), self._due = self._due, None
            if future.set_running_or_notify_cancel():
                future.set_exception(RuntimeError(reason))

    def do_due(self) -> None:
        """Do the work of `finish_then` if its time has come: between two steps."""
        if self._due is None or self._is_stepping or not self.is_due_later:
            return
        self.check_between_steps("do_due")
        self._abort_dropped()
        if self._due is not None and not self._begun():
            (_, work), self._due = self._due, None
            work()

    @uninterrupted
    def entries(self, version: str) -> list[Entry]:
        """Return the unfinished requests, each with its namespace and adapter under a version. Nothing changes."""
        self._abort_dropped()
        return [
            (request, *self._weights.entry(request.own_namespace, request.params.adapter, version))
            for request in [*self._scheduler.running, *self._scheduler.waiting]
        ]

    @uninterrupted
    def go_stale(self) -> int:
        """Let running requests that have tokens keep K and V of older weights; return how many. See Scheduler."""
        return self._scheduler.go_stale()

    @uninterrupted
    def restart(self, entries: Sequence[Entry], keeps_stale: bool = False) -> None:
        """Have every request compute all of its K and V again, from no segment that was found; its tokens stay.

        entries: of all requests, for the weights that compute them. keeps_stale: see Scheduler.restart.
        """
        self._scheduler.restart(keeps_stale)
        for request, namespace, adapter in entries:
            request.enter(namespace, adapter)
        for request in self._scheduler.waiting:
            self._connectors.hand_over(request)
            if request.blending is not None:
                request.blending.forget_found()

    @uninterrupted
    def disconnect(self) -> None:
        """Let go of the store and the segments; waiting requests are computed without the segments that were found."""
        self.thread.check()
        self._connectors.close()
        for request in self._scheduler.waiting:
            if request.blending is not None:
                request.blending.set_found([], [])

    def check_between_steps(self, call: str) -> None:
        """RuntimeError, with the call's name, during a step, on another's thread, and in a forked process."""
        self._process.check()
        self.thread.check()
        if self._is_stepping:
            raise RuntimeError(f"{call} must not be called during a step")

    def compute(self, items: Sequence[BatchItem]) -> torch.Tensor:
        """Compute tokens of sequences that belong to no request; return the logits of the wanted tokens."""
        with self._stepping():
            self._look_at_weights(False)
            logits = self._batch_runner.run(items).logits
            self._batch_runner.check_all_kernels()  # the caller commits next
            return logits

    def between_requests(self, work: Callable[[], None]) -> None:
        """Do work that uses the model and no request, as a step of its own."""
        self._batch_runner.check()
        with self._stepping():
            work()

    # --- a step ------------------------------------------------------------------------------------------------------

    @contextmanager
    def _stepping(self) -> Iterator[None]:
        """Inside, other calls are held back. Ctrl-C is raised after it, but for one while the model computes."""
        with HeldInterrupts():
            self._begin_step()
            try:
                yield
            finally:
                self._end_step()

    def _begin_step(self) -> None:
        """Hold other calls back from now on: requests leave the scheduler only as the step wants."""
        self._process.check()
        self.thread.check()
        if self._is_stepping:
            raise RuntimeError("a step must not begin before the one under way has ended")
        if self._dropped:
            self._abort_dropped()
        self._is_stepping = True

    def _end_step(self) -> None:
        self._is_stepping = False
        if self._dropped:
            self._abort_dropped()
        self._telemetry.tell()

    def _abort_dropped(self) -> None:
        with HeldInterrupts():
            while self._dropped:
                request = self._dropped.popleft()
                if self.requests.get(request.request_id) is request:
                    self.abort(request)

    def _put_back(self, untaken: Sequence[Request]) -> list[Request]:
        """Put the requests of a failed batch back into the queue; return those that wait for another try."""
        ahead = () if self.decoder is None else self.decoder.drop()
        for request in untaken:
            request.take_back(request in ahead, request in self._scheduler.waiting)
        self._scheduler.requeue([*untaken, *(ahead if self._scheduler.keeps_states else ())])
        return [request for request in untaken if request in self._scheduler.waiting]

    def _take_batch(self, batch: Batch, untaken: list[Request]) -> None:
        """Compute a batch, and hand out its tokens. untaken: the requests that still lack theirs, kept up to date."""
        begin = time.monotonic()
        if self.decoder is not None and self.decoder.takes(batch):
            chosen = chosen_of_decodes(batch, self.decoder.choose(batch))
        else:
            chosen = choose_tokens(batch, self._logits(batch))
        self._batch_runner.check_kernels()
        now = time.monotonic()
        if batch.prefills:
            self._learn_speed(batch, now - begin)
        untaken += chosen.new_requests
        self._complete(chosen)
        self._hand_out(chosen, now, untaken)
        for request in chosen.failed:
            self._fail(request, request.why_no_token())

    def _blame(self, requests: Sequence[Request], error: Exception) -> Exception | None:
        """Note that a step of these requests has raised; return the error if that was the first time."""
        if not requests or self._suspects.blame(requests):
            return error
        culprit = self._suspects.narrow(requests)
        if culprit is not None:
            self._fail(culprit, f"{type(error).__name__}: {error}")
        return None

    def _next_batch(self) -> Batch:
        """Return the batch of the step that was begun ahead, or else schedule one."""
        decoder, scheduler = self.decoder, self._scheduler
        if decoder is not None and decoder.is_ahead:
            decoder.settle()
            self._connectors.ask(scheduler.waiting, scheduler.num_queued)
            batch = decoder.resume()
            if batch is not None:
                return batch
        return self._schedule()

    def _schedule(self) -> Batch:
        scheduler, connectors, tried = self._scheduler, self._connectors, self._suspects.group
        if self._due is not None and not tried:
            tried = self._begun()
        if tried:  # no other request may hold blocks, or have a part in the failure
            scheduler.requeue([request for request in scheduler.running if request not in tried])
        while True:
            connectors.ask(scheduler.waiting, scheduler.num_queued)
            batch = scheduler.schedule(tried)
            if len(batch) or not scheduler.waiting:
                return batch
            limit = None if self._limit is None else self._limit()
            with interruptible():
                connectors.wait(limit)
            if limit is not None and limit.is_reached:
                return batch

    def _logits(self, batch: Batch) -> torch.Tensor:
        """Return the logits after each decode, and after each portion: [len(batch), vocab_size]."""
        if not batch.prefills:
            return self._batch_runner.compute(batch)
        scores = batch.scores_prompts
        if not any(portion.request.reuse for portion in batch.prefills):
            logits = self._batch_runner.compute(batch, self._connectors.begin_step(batch.prefills))
        else:
            computed = self._batch_runner.run(batch.items(), self._connectors.blender)
            self._connectors.note_blended(batch.requests, computed.blended)
            logits = computed.logits
        return take_prompt_logprobs(batch, logits) if scores else logits

    def _learn_speed(self, batch: Batch, seconds: float) -> None:
        is_prefill = batch.num_tokens >= 4 * len(batch)  # mostly
        if not is_prefill or any(portion.request.reuse for portion in batch.prefills):
            return
        self._connectors.saw_prefill(batch.num_tokens, seconds)
        if self._rule:
            self._rule.saw_prefill(batch.num_tokens, seconds)

    def _complete(self, chosen: ChosenTokens) -> None:
        if chosen.prefilled:
            self._connectors.keep(chosen.prefilled)
        self._scheduler.complete(chosen.batch)
        for request, forks in chosen.forks.items():
            self._scheduler.fork(request, forks)
        if chosen.batch.prefills:
            self._connectors.save(chosen.prefilled, chosen.batch.prefills)

    # --- a request's tokens ------------------------------------------------------------------------------------------

    def _hand_out(self, chosen: ChosenTokens, now: float, untaken: list[Request]) -> None:
        """Hand out the tokens: those of decodes that go on at once, then the others one by one. untaken: as above."""
        decodes, first = chosen.batch.decodes, [*chosen.prefilled, *chosen.new_requests]
        num_decodes = len(decodes.requests)
        tokens = chosen.token_ids[:num_decodes] if first else chosen.token_ids
        rows = decodes.last_rows(tokens)
        decodes.take(tokens, self._outputs, but=rows)
        last = [decodes.requests[row] for row in rows] if rows else []
        untaken[:] = [*chosen.failed, *first[::-1], *last[::-1]]
        self.num_generated_tokens += num_decodes - len(rows)
        self._suspects.clear(decodes.requests)
        if untaken:
            token_ids = [*tokens[rows].tolist(), *chosen.token_ids[num_decodes:].tolist()]
            for request, token in zip([*last, *first], token_ids, strict=True):
                self._take_token(request, token, now, chosen.logprobs.get(request))
                untaken.pop()

    def _take_token(self, request: Request, token: int, now: float, logprobs: TokenLogprobs | None) -> None:
        self.num_generated_tokens += 1
        if request.append(token, now, logprobs):
            self._scheduler.keep_state(request)
            self._connectors.save_generated(request)
            self._end(request)
        self._suspects.clear([request])
        self._tell(request, token, logprobs)

    def _fail(self, request: Request, reason: str) -> None:
        """End it, and forget its cached blocks, but for those that others use or share."""
        request.end("error", reason)
        self._scheduler.spoil(request)
        self._end(request)
        self._scheduler.forget_cached(request)
        self._tell(request, None)

    def _tell(self, request: Request, token: int | None, logprobs: TokenLogprobs | None = None) -> None:
        """Hand its caller its new token, or its end without one."""
        group, output = request.group, None
        if group.is_over:
            del self.requests[request.request_id]
            self.num_finished += 1
            output = group.samples[0].output()
            group.let_go()
        sink = self._outputs if group.sink is None else group.sink
        has_ended = request.finish_reason is not None
        sink.append(
            StepOutput(
                request.request_id,
                token,
                request.sample_index,
                request.finish_reason,
                output,
                request.error,
                logprobs,
                stop_reason=request.stop_reason if has_ended else None,
                text=request.text if has_ended else None,
            )
        )

    def _end(self, request: Request) -> None:
        self._suspects.clear([request])
        self._scheduler.finish(request)
        self._connectors.forget(request)
        if self.decoder is not None and not self._scheduler.running:
            self.decoder.let_go()


def step_on(loop: ServingLoop, future: "Future[None]") -> None:
    """Step until the future is done. The first exception of a batch is logged, and the batch is tried again."""
    while not future.done():
        failure = loop.try_step()
        if failure is not None:
            logger.warning("a step raised, and its requests are computed once more", exc_info=failure)

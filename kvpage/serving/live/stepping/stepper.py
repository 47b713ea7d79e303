"""Stepper: the thread that steps an engine, and does everything else that is done with it.

inbox ─► queue, abort, call ─┐
deadlines ─► abort ──────────┼─► step ─► sink ─► mailboxes ─► wakeups, one for each event loop
                             │
           nothing to do: it sleeps until there is work in the inbox, or a deadline
"""

import atexit
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from kvpage.checks.fork_guard import ForkGuard
from kvpage.checks.wait_limit import WaitLimit
from kvpage.serving.live.config import AsyncEngineConfig
from kvpage.serving.live.errors import EngineClosed
from kvpage.serving.live.mailbox import Mailbox, Wakeups
from kvpage.serving.live.stepping.admission import Admission, FinishRate
from kvpage.serving.live.stepping.deadlines import Deadlines
from kvpage.serving.live.stepping.inbox import Inbox
from kvpage.serving.live.stepping.served_engine import ServedEngine
from kvpage.serving.loop.outputs import FinishReason, RequestOutput, Sample, StepOutput
from kvpage.serving.loop.ranks.rank_lost import RankLost
from kvpage.serving.loop.request import Request

logger = logging.getLogger(__name__)
EXIT_TIMEOUT = 30.0
"""Seconds that the interpreter's end waits for a step."""


def outcome_of(request: Request) -> RequestOutput:
    """Return the outcome of a request that the engine does not have, or not any more."""
    if request.group.samples:
        return request.output()
    begin, samples = request.group.arrival_time, (Sample(request.generated_token_ids, "abort"),)
    num_cached = request.group.num_cached_tokens or 0
    return RequestOutput(
        request.request_id, request.prompt.tolist(), samples, num_cached, begin, None, time.monotonic()
    )


def ended(output: RequestOutput, reason: FinishReason, error: str | None) -> RequestOutput:
    """Return the outcome with the reason, and the error, for the samples that were not complete."""
    samples = [
        replace(sample, finish_reason=reason, error=error) if sample.finish_reason == "abort" else sample
        for sample in output.samples
    ]
    return replace(output, samples=tuple(samples))


class Stepper:
    """One engine, its thread, and the mailboxes of the requests that this thread computes.

    It knows nothing of the AsyncEngine, which may be forgotten. All methods with `_` are for its own thread. failure:
    the exception that has ended the thread; None if none has.
    """

    def __init__(self, engine: ServedEngine, config: AsyncEngineConfig) -> None:
        if engine.has_unfinished:
            raise ValueError("engine must have no unfinished requests, got one that has: run them to their ends")
        engine.loop.thread.take("an AsyncEngine")
        self.engine, self.config = engine, config
        self.inbox, self.rate = Inbox(), FinishRate()
        self.admission = Admission(self.inbox, config.max_num_waiting, self.rate, lambda: engine.loop.num_waiting)
        self.sink: deque[StepOutput] = deque()
        self.failure: BaseException | None = None
        self.num_aborted = self.num_late = self.num_slow = self.num_failed = 0
        self._mailboxes: dict[str, Mailbox] = {}
        self._deadlines, self._wakeups = Deadlines(), Wakeups()
        self._drains: list[tuple[float, Future[int]]] = []
        self._num_drained = 0  # requests that drains have aborted
        self._is_stopping = False
        self._process = ForkGuard("the engine")
        self.thread = threading.Thread(target=self._run, name="kvpage-step", daemon=True)

    def start(self) -> None:
        """Start the thread. Where that fails, the engine is its owner's again."""
        try:
            self.thread.start()
        except BaseException:
            self.engine.loop.thread.let_go()
            raise
        atexit.register(self.stop_at_exit)

    # --- other threads -----------------------------------------------------------------------------------------------

    def check_process(self) -> None:
        """Raise RuntimeError in a forked process, which has no such thread."""
        self._process.check()

    def check_not_here(self, call: str) -> None:
        """Raise RuntimeError on the stepping thread, which cannot wait for itself."""
        if threading.current_thread() is self.thread:
            raise RuntimeError(f"{call} must not be called on the stepping thread")

    def queue(self, mailbox: Mailbox) -> None:
        """Have a request computed. EngineClosed, QueueFull and ValueError as Admission.enter."""
        self.admission.enter(mailbox.request_id, partial(self._queue, mailbox))

    def abort(self, mailbox: Mailbox) -> None:
        """End a request soon."""
        if not mailbox.is_over and self._process.is_here:
            self.inbox.put(partial(self._abort, mailbox))

    def drop(self, mailbox: Mailbox) -> None:
        """End a request that nobody reads; for finalizers."""
        if not mailbox.is_over and self._process.is_here:
            self.inbox.leave(partial(self._abort, mailbox))

    def call(self, function: Callable[[Any], Any], future: "Future[Any]") -> None:
        """Have the function called between two steps."""
        self.admission.put(partial(self._call, function, future))

    def drain(self, timeout: float, future: "Future[int]") -> None:
        """Take no more requests; set the future once all have ended."""
        work = partial(self._begin_drain, time.monotonic() + timeout, future)
        self.admission.drain("the engine drains, and takes no more requests", work)

    def stop(self) -> None:
        """Have the thread end soon, and with it all requests."""
        self.admission.close("the engine is closed", self._stop)

    def stop_later(self) -> None:
        """Do the same without a lock; for finalizers."""
        self.inbox.leave(self._stop)

    def stop_at_exit(self) -> None:
        """Stop, and wait: at the interpreter's end no thread may be amid torch's code."""
        if self._process.is_here:
            self.stop()
            self.thread.join(EXIT_TIMEOUT)

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._enter()
            while not self._is_stopping:
                self._turn()
        except BaseException as error:  # whatever ends the thread must end the requests, too
            logger.critical("the thread of an AsyncEngine has failed", exc_info=error)
            self.failure = error
        finally:
            self._leave()

    def _enter(self) -> None:
        loop, device = self.engine.loop, self.engine.cache.device
        loop.thread.enter()
        loop.limit_waits(self._wait_limit)
        if device.type == "cuda":
            torch.cuda.set_device(device)  # each thread has its own

    def _wait_limit(self) -> WaitLimit:
        return WaitLimit(self.inbox.bell(), self._next_deadline)

    @property
    def _next_deadline(self) -> float:
        return min([self._deadlines.next, self.engine.loop.next_due, *(deadline for deadline, _ in self._drains)])

    def _turn(self) -> None:
        """Do the work that has come, and a step; sleep if there is neither."""
        has_requests = bool(self.engine.loop.requests)
        for work in self.inbox.take() if has_requests else self.inbox.wait(self._next_deadline):
            work()
        self._end_late(time.monotonic())
        if self.engine.loop.requests:
            self._step()
            if not self.engine.loop.requests:
                self._watch_saves()
        elif time.monotonic() >= self.engine.loop.next_due:
            self._tend()
        self._deliver()
        self._wakeups.send()
        self._end_drains()

    def _step(self) -> None:
        try:
            failure = self.engine.loop.try_step()
        except RankLost:
            raise
        except Exception as error:  # of no batch: it would come again at every step
            logger.error("a step raised, and all requests end with its error", exc_info=error)
            self._end_all("error", f"{type(error).__name__}: {error}")
            for request in list(self.engine.loop.requests.values()):  # those that calls have queued
                self.engine.loop.abort(request)
            return
        if failure is not None:
            logger.warning("a step raised, and its requests are computed once more", exc_info=failure)

    def _tend(self) -> None:
        """Do what is due between requests. Where a move fails, it stays due with the next step."""
        try:
            self.engine.loop.tend()
        except Exception as error:
            logger.error("what was due between requests has failed", exc_info=error)

    def _watch_saves(self) -> None:
        """Have an idle engine step once more when something is stored: that step lets go of its blocks."""
        for future in self.engine.saves_under_way():
            future.add_done_callback(lambda _: self.inbox.put(self._step))

    def _deliver(self) -> None:
        """Put the outputs of the last step into the mailboxes, and wake their readers."""
        sink, mailboxes, most = self.sink, self._mailboxes, self.config.max_buffered_tokens
        slow = []
        while sink:
            item = sink.popleft()
            mailbox = mailboxes[item.request_id]
            num_kept = mailbox.put(item, self._wakeups)
            if item.output is not None:
                self._forget(mailbox)
            elif num_kept > most:
                slow.append(mailbox)
        for mailbox in slow:
            self.num_slow += self._end(mailbox, "abort", f"the reader is more than {most} tokens back")

    # --- work --------------------------------------------------------------------------------------------------------

    def _queue(self, mailbox: Mailbox) -> None:
        self._mailboxes[mailbox.request_id] = mailbox
        try:
            with self.admission.arriving():
                if mailbox.request is not None:
                    self.engine.loop.add(mailbox.request)
        except ValueError as error:  # a call has queued a request of this id
            self._end(mailbox, "error", str(error))
        self._deadlines.add(mailbox)

    def _abort(self, mailbox: Mailbox) -> None:
        self.num_aborted += self._end(mailbox, "abort", None)

    def _call(self, function: Callable[[Any], Any], future: "Future[Any]") -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = function(self.engine)
        except BaseException as error:  # it is the caller's
            future.set_exception(error)
        else:
            future.set_result(result)
        for mailbox in list(self._mailboxes.values()):
            if mailbox.request is not None and mailbox.request.group.is_aborted:  # by the function
                self.num_aborted += self._end(mailbox, "abort", None)

    def _begin_drain(self, deadline: float, future: "Future[int]") -> None:
        if future.set_running_or_notify_cancel():
            self._drains.append((deadline, future))

    def _stop(self) -> None:
        self._is_stopping = True

    # --- ends of requests --------------------------------------------------------------------------------------------

    def _end_late(self, now: float) -> None:
        for mailbox in self._deadlines.take(now):
            self.num_late += self._end(mailbox, "abort", "deadline")
        if any(deadline <= now for deadline, _ in self._drains):
            self._num_drained += self._end_all("abort", "the engine was drained")

    def _end_drains(self) -> None:
        if self._drains and not self._mailboxes:
            for _, future in self._drains:
                future.set_result(self._num_drained)
            self._drains = []

    def _end_all(self, reason: FinishReason, error: str) -> int:
        return sum([self._end(mailbox, reason, error) for mailbox in list(self._mailboxes.values())])

    def _end(self, mailbox: Mailbox, reason: FinishReason, error: str | None) -> bool:
        """End a request before its last token; return whether it had not ended yet."""
        self._deliver()
        request = mailbox.request
        if request is None or mailbox.request_id not in self._mailboxes:
            return False
        is_queued = self.engine.loop.requests.get(request.request_id) is request
        output = self.engine.loop.abort(request) if is_queued else outcome_of(request)
        self._tell_end(mailbox, reason, error, output)
        return True

    def _tell_end(self, mailbox: Mailbox, reason: FinishReason, error: str | None, output: RequestOutput) -> None:
        output = ended(output, reason, error)
        mailbox.put(StepOutput(mailbox.request_id, None, 0, reason, output, error), self._wakeups)
        self._forget(mailbox)

    def _forget(self, mailbox: Mailbox) -> None:
        del self._mailboxes[mailbox.request_id]
        output = mailbox.output
        self.num_failed += output is not None and any(sample.finish_reason == "error" for sample in output.samples)
        self.admission.leave(mailbox.request_id, time.monotonic())

    def _leave(self) -> None:
        """End all that is under way, and give the engine back."""
        failure, loop = self.failure, self.engine.loop
        reason = "the engine is closed" if failure is None else f"the engine has failed: {failure!r}"
        self.admission.close(reason)
        for work in self.inbox.take():
            self._refuse(work, reason)
        try:
            self._deliver()
            self._end_all("abort" if failure is None else "error", reason)
            self.engine.close()
        except Exception as error:  # nobody else would see it
            logger.error("an engine could not be closed", exc_info=error)
            self.failure = failure or error
        finally:
            self._abandon(reason)
            self._wakeups.send()
            self._end_drains()
            loop.limit_waits(None)
            loop.thread.let_go()
            atexit.unregister(self.stop_at_exit)

    def _abandon(self, reason: str) -> None:
        """Tell the readers that are left that an engine which could not even abort computes no more."""
        for mailbox in list(self._mailboxes.values()):
            if mailbox.request is not None:
                self._tell_end(mailbox, "error", reason, outcome_of(mailbox.request))

    def _refuse(self, work: Callable[[], object], reason: str) -> None:
        """Take work that has come too late: requests end with the others, calls fail."""
        if not isinstance(work, partial):
            return
        if work.func == self._queue:
            self._mailboxes[work.args[0].request_id] = work.args[0]
            with self.admission.arriving():
                pass
        elif work.func == self._begin_drain:
            work()
        elif work.func == self._call and work.args[1].set_running_or_notify_cancel():
            work.args[1].set_exception(EngineClosed(reason))

"""AsyncEngine: an Engine for many callers at once.

coroutines, threads ─► submit ─► inbox ─► one thread steps ─► mailboxes ─► coroutines, threads
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

from kvpage.blocks.explain import Explanation, Searched
from kvpage.checks.interrupts import HeldInterrupts
from kvpage.checks.tokens import Tokens
from kvpage.checks.values import check_at_least
from kvpage.serving.assembly.weight_updates import Running
from kvpage.serving.live.config import AsyncEngineConfig, check_seconds
from kvpage.serving.live.live_request import LiveRequest
from kvpage.serving.live.mailbox import Mailbox
from kvpage.serving.live.stepping.served_engine import ServedEngine
from kvpage.serving.live.stepping.stepper import Stepper
from kvpage.serving.loop.intake import Prompt
from kvpage.serving.loop.outputs import RequestOutput
from kvpage.serving.params.sampling import SamplingParams
from kvpage.serving.sessions.session import Session
from kvpage.serving.stats.engine_stats import EngineStats
from kvpage.serving.stats.explaining import Question

Result = TypeVar("Result")
DEFAULT = AsyncEngineConfig()
SECONDS_BETWEEN_LOOKS = 0.05


@dataclass(frozen=True, slots=True)
class AsyncEngineStats:
    """Counters since the AsyncEngine was made, and its state now.

    Attributes:
        engine: The numbers of the engine.
        num_unfinished: Requests that have been submitted and have not ended.
        num_waiting: Requests that wait, preempted requests included.
        num_submitted: Requests that were taken.
        num_refused: Requests that were refused by QueueFull.
        num_aborted: Requests that were aborted, by callers or because their readers went.
        num_late: Requests that reached their deadlines.
        num_slow: Requests whose readers fell too far back.
        num_failed: Requests that ended with an error.
        is_draining: Whether no more requests are taken.
    """

    engine: EngineStats
    num_unfinished: int
    num_waiting: int
    num_submitted: int
    num_refused: int
    num_aborted: int
    num_late: int
    num_slow: int
    num_failed: int
    is_draining: bool


class AsyncEngine:
    """An engine that any number of threads, and coroutines of any number of event loops, use at once.

        async with AsyncEngine(engine) as live:
            async for outputs in live.submit(tokens, params): ...
            output = await live.generate(tokens, params)

    One thread steps, from the beginning until `close`; it sleeps while there is nothing to do. It owns the engine: use
    that by way of `call`. An AsyncEngine that nobody holds, and no LiveRequest of it, closes itself.

    A step that raises fails its requests and no others; see Engine.step.

    Attributes:
        engine: The engine. Other threads may read its settings, and `stats()`.
        config: The limits.
    """

    def __init__(self, engine: ServedEngine, config: AsyncEngineConfig = DEFAULT) -> None:
        """Take the engine, and start the thread.

        Args:
            engine: An engine without unfinished requests. `close` closes it.
            config: The limits.

        Raises:
            RuntimeError: Another AsyncEngine has the engine, or no thread can be started.
            ValueError: The engine has unfinished requests.
            TypeError: An argument has another type.
        """
        if not hasattr(engine, "loop"):
            raise TypeError(f"engine must be an Engine, got {type(engine).__name__}")
        if not isinstance(config, AsyncEngineConfig):
            raise TypeError(f"config must be an AsyncEngineConfig, got {type(config).__name__}")
        self.engine, self.config = engine, config
        self._stepper = Stepper(engine, config)
        self._ids, self._nonce = count(), secrets.token_hex(4)
        self._stepper.start()

    # --- requests ----------------------------------------------------------------------------------------------------

    def submit(
        self,
        tokens: Tokens,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        namespace: bytes = b"",
        priority: int = 0,
        timeout: float | None = None,
        blend: bool = False,
        segments: Sequence[int] | None = None,
        cache_at: Sequence[int] = (),
    ) -> LiveRequest:
        """Queue a prompt. It never waits for a step; any thread may call it.

        Args:
            tokens: See Engine.add_request.
            params: See Engine.add_request.
            request_id: An id that no unfinished request has. None means a new one.
            namespace: See Engine.add_request.
            priority: Requests with a lower number are scheduled first, and preempted last.
            timeout: Seconds after which the request ends, with the finish_reason "abort" and the error "deadline". None
                means never.
            blend: See Engine.add_request.
            segments: See Engine.add_request.
            cache_at: See Engine.add_request.

        Returns:
            The request, to be read.

        Raises:
            ValueError, TypeError: As Engine.add_request. `timeout` is no positive number.
            QueueFull: Too many requests wait.
            EngineClosed: The engine drains, is closed, or has failed.
            RuntimeError: This is a forked process.
        """
        prompt = Prompt(
            tokens,
            params,
            request_id,
            namespace,
            blend,
            segments,
            sink=self._stepper.sink,
            priority=priority,
            cache_at=cache_at,
        )
        return self._submit(prompt, timeout, keeps_tokens=True)

    async def generate(
        self,
        tokens: Tokens,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        namespace: bytes = b"",
        priority: int = 0,
        timeout: float | None = None,
        blend: bool = False,
        segments: Sequence[int] | None = None,
        cache_at: Sequence[int] = (),
    ) -> RequestOutput:
        """Run a prompt to its end. Cancelling the task aborts it.

        Args:
            tokens: See Engine.add_request.
            params: See Engine.add_request.
            request_id: See `submit`.
            namespace: See Engine.add_request.
            priority: See `submit`.
            timeout: See `submit`.
            blend: See Engine.add_request.
            segments: See Engine.add_request.
            cache_at: See Engine.add_request.

        Returns:
            The outcome, also of a request that has failed; see its `error`.

        Raises:
            ValueError, TypeError, QueueFull, EngineClosed, RuntimeError: As `submit`.
        """
        prompt = Prompt(
            tokens,
            params,
            request_id,
            namespace,
            blend,
            segments,
            sink=self._stepper.sink,
            priority=priority,
            cache_at=cache_at,
        )
        request = self._submit(prompt, timeout, keeps_tokens=False)
        async for _ in request:
            pass
        assert request.output is not None
        return request.output

    def _submit(self, prompt: Prompt, timeout: float | None, keeps_tokens: bool) -> LiveRequest:
        begin, stepper = time.monotonic(), self._stepper
        stepper.check_process()
        if timeout is not None and not check_seconds("timeout", timeout):
            raise ValueError(f"timeout must be positive, got {timeout}")
        stepper.admission.check()  # a full queue costs no more than this
        request_id = f"live-{self._nonce}-{next(self._ids)}" if prompt.request_id is None else prompt.request_id
        request = self.engine.prepare(prompt, request_id)
        mailbox = Mailbox(request, keeps_tokens, None if timeout is None else begin + timeout)
        with HeldInterrupts():  # what is queued has a reader, which aborts it when Ctrl-C comes
            stepper.queue(mailbox)
            return LiveRequest(mailbox, stepper, self)

    def check_room(self, num_requests: int = 1) -> None:
        """Raise as `submit` would now if num_requests requests do not fit into the queue. Any thread may ask.

        Args:
            num_requests: Requests that are to be submitted.

        Raises:
            QueueFull: Too many requests wait, with these.
            EngineClosed: The engine drains, is closed, or has failed.
            ValueError: `num_requests` is no positive integer.
        """
        check_at_least("num_requests", num_requests, 1)
        self._stepper.admission.check(num_requests)

    # --- the engine as a whole ---------------------------------------------------------------------------------------

    def call(self, function: Callable[[Any], Result]) -> "Future[Result]":
        """Have a function called with the engine, on the stepping thread, between two steps.

        All requests wait meanwhile. Any thread may call it. On the stepping thread itself, within such a function, do
        not wait for the future.

        Args:
            function: For example `Engine.reset_prefix_cache`, or one that reads several numbers of one moment.

        Returns:
            A future of its result, or its exception. Coroutines wait by asyncio.wrap_future.

        Raises:
            EngineClosed: The engine is closed, or has failed.
            TypeError: `function` is not callable.
            RuntimeError: This is a forked process.
        """
        if not callable(function):
            raise TypeError(f"function must be callable, got {type(function).__name__}")
        self._stepper.check_process()
        future: Future[Result] = Future()
        self._stepper.call(function, future)
        return future

    def in_session(
        self, session_id: str, function: Callable[[Session], Result], namespace: bytes = b""
    ) -> "Future[Result]":
        """Have a function called with a session, on the stepping thread, between two steps; see Engine.session.

        Args:
            session_id: The session's id.
            function: For example `lambda session: session.pause(30)`.
            namespace: Of its requests.

        Returns:
            A future, as of `call`.

        Raises:
            EngineClosed, TypeError, RuntimeError: As `call`.
        """
        if not callable(function):
            raise TypeError(f"function must be callable, got {type(function).__name__}")
        return self.call(lambda engine: function(engine.session(session_id, namespace)))

    async def explain(
        self,
        tokens: Tokens,
        namespace: bytes = b"",
        adapter: str | None = None,
        *,
        searched: Searched = "all",
        turns: "AbstractAsyncContextManager[object] | None" = None,
    ) -> Explanation:
        """Return how far what is cached reaches into a prompt, and why it ends there; see Engine.explain.

        Steps go on while a store is asked. All that is told is of one moment, after its answer.

        Args:
            tokens: See Engine.explain.
            namespace: See Engine.explain.
            adapter: See Engine.explain.
            searched: Where a longer match is searched: "all" namespaces; the caller's "own", by other weights; "none".
            turns: Entered for each call on the stepping thread, and not while a store is asked: a semaphore, which
                bounds the calls between two steps. None for no bound.

        Returns:
            The explanation.

        Raises:
            ValueError, TypeError: As Engine.explain.
            EngineClosed: The engine is closed, or has failed.
        """
        turns = nullcontext() if turns is None else turns
        asked: Future[Question] | None = None
        try:
            async with turns:
                asked = self.call(lambda engine: engine.ask(tokens, namespace, adapter))
                question = await asyncio.wrap_future(asked)
            if question.stored is not None:
                waiting = asyncio.wrap_future(question.stored)
                waiting.add_done_callback(_take_failure)  # it is in the answer, and no news for the loop
                await asyncio.wait([waiting], timeout=self.engine.config.store_deadline)
            async with turns:
                return await asyncio.wrap_future(self.call(lambda engine: engine.answer(question, searched)))
        except asyncio.CancelledError:
            if asked is not None:
                asked.add_done_callback(_cancel_question)
            raise

    async def update_weights(
        self, version: str, change: Callable[[], object] | None = None, *, running: Running = "restart"
    ) -> None:
        """Begin a version of the weights; see Engine.update_weights. Tokens go on coming while requests finish.

        Cancelling the task while they do withdraws the update.

        Args:
            version: The name of the new weights.
            change: Changes them, on the stepping thread, between two steps.
            running: What becomes of requests that have begun.

        Raises:
            ValueError, RuntimeError: As Engine.update_weights, and what `change` raises.
            EngineClosed: The engine is closed, or has failed; the version is the same as before.
        """
        began = self.call(lambda engine: engine.begin_update(version, change, running))
        try:
            update = await asyncio.wrap_future(began)
            waiting = asyncio.wrap_future(update)
            while not update.done():  # its requests may end by other things than steps
                await asyncio.wait([waiting], timeout=SECONDS_BETWEEN_LOOKS)
                await asyncio.wrap_future(self.call(lambda engine: engine.loop.do_due()))
            await waiting
        finally:
            began.add_done_callback(_cancel_update)  # where it was cancelled: nothing must change after it

    def stats(self) -> AsyncEngineStats:
        """Return counters and the state now; any thread may ask.

        Returns:
            The numbers. They are not all of one moment.
        """
        stepper, admission = self._stepper, self._stepper.admission
        engine = self.engine.stats()
        return AsyncEngineStats(
            engine=engine,
            num_unfinished=admission.num_unfinished,
            num_waiting=engine.num_waiting + admission.num_arriving,
            num_submitted=admission.num_submitted,
            num_refused=admission.num_refused,
            num_aborted=stepper.num_aborted,
            num_late=stepper.num_late,
            num_slow=stepper.num_slow,
            num_failed=stepper.num_failed,
            is_draining=not admission.takes_requests,
        )

    @property
    def failure(self) -> BaseException | None:
        """The exception that has ended the stepping thread, such as RankLost; None if none has."""
        return self._stepper.failure

    @property
    def takes_requests(self) -> bool:
        """Whether it neither drains nor is closed."""
        return self._stepper.admission.takes_requests

    # --- ends --------------------------------------------------------------------------------------------------------

    async def drain(self, timeout: float | None = None) -> int:
        """Take no more requests, and wait for those under way. Calls are still done.

        A cancelled drain goes on: it takes no more requests.

        Args:
            timeout: Seconds, after which those that are left are aborted. None means AsyncEngineConfig.drain_timeout.

        Returns:
            How many requests were aborted for it.

        Raises:
            EngineClosed: The engine is closed, or has failed.
            ValueError, TypeError: `timeout` is no such number.
        """
        return await asyncio.wrap_future(self.begin_drain(timeout))

    def begin_drain(self, timeout: float | None = None) -> "Future[int]":
        """Do the same for callers without an event loop.

        Args:
            timeout: See `drain`.

        Returns:
            A future of the number of requests that were aborted, done once all have ended.

        Raises:
            EngineClosed, ValueError, TypeError: As `drain`.
        """
        seconds = self.config.drain_timeout if timeout is None else timeout
        check_seconds("timeout", seconds)
        self._stepper.check_process()
        future: Future[int] = Future()
        self._stepper.drain(seconds, future)
        return future

    def close(self) -> None:
        """Abort what is under way, end the thread, and close the engine. It waits for the end of the step.

        A second call does nothing but wait for the first. The engine may be used directly again, without its store.

        Raises:
            RuntimeError: It is called within a function of `call`, or in a forked process.
        """
        self._stepper.check_process()
        self._stepper.check_not_here("close")
        self._stepper.stop()
        self._stepper.thread.join()

    async def aclose(self) -> None:
        """Do the same without blocking the event loop.

        Raises:
            RuntimeError: As `close`.
        """
        await asyncio.to_thread(self.close)

    def __enter__(self) -> "AsyncEngine":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    async def __aenter__(self) -> "AsyncEngine":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if hasattr(self, "_stepper"):
            self._stepper.stop_later()


def _cancel_update(began: "Future[Future[None]]") -> None:
    if not began.cancelled() and began.exception() is None:
        began.result().cancel()


def _cancel_question(asked: "Future[Question]") -> None:
    if asked.cancelled() or asked.exception() is not None:
        return
    stored = asked.result().stored
    if stored is not None:
        stored.cancel()  # if no thread has taken it up


def _take_failure(future: "asyncio.Future[Any]") -> None:
    if not future.cancelled():
        future.exception()

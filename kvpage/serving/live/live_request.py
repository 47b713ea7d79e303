"""LiveRequest: one request of an AsyncEngine, as its caller reads and ends it."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Protocol

from kvpage.serving.live.mailbox import LoopWaiter, Mailbox, ThreadWaiter
from kvpage.serving.loop.outputs import RequestOutput, StepOutput
from kvpage.serving.text.token_logprobs import TokenLogprobs


class Steps(Protocol):
    """The side of a Stepper that ends requests."""

    def abort(self, mailbox: Mailbox) -> None:
        """End a request soon."""

    def drop(self, mailbox: Mailbox) -> None:
        """End a request that nobody reads; for finalizers."""

    def check_process(self) -> None:
        """Raise RuntimeError in a forked process."""


class LiveRequest:
    """A request under way. Iterate over it, in a coroutine or in a thread; one reader at a time.

        request = engine.submit(tokens, params)
        async for outputs in request:       each a list: all that has come since the last one, never empty
            for output in outputs: ...
        request.output                      the outcome

    A loop that ends early, by `break`, an exception or cancellation, aborts the request. So does a LiveRequest that
    nobody holds any more.
    """

    def __init__(self, mailbox: Mailbox, steps: Steps, owner: object) -> None:
        """Make it; `AsyncEngine.submit` does.

        Args:
            mailbox: Where its outputs come.
            steps: Ends it.
            owner: Kept alive as long as this is.
        """
        self._mailbox, self._steps, self._owner = mailbox, steps, owner

    @property
    def request_id(self) -> str:
        """Its id."""
        return self._mailbox.request_id

    @property
    def output(self) -> RequestOutput | None:
        """The outcome, once the request has ended; None before. The last outputs may not have been read then."""
        return self._mailbox.output

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs | None] | None:
        """The prompt_logprobs of RequestOutput: from the first token on, where this process computes the request."""
        request, output = self._mailbox.request, self._mailbox.output
        if output is not None:
            return output.prompt_logprobs
        scored = None if request is None else request.scored
        return None if scored is None else scored.logprobs

    def abort(self) -> None:
        """End it soon: between two steps. Any thread may call it, also after the end. Its reader gets what there is."""
        self._steps.abort(self._mailbox)

    def __aiter__(self) -> AsyncIterator[list[StepOutput]]:
        return _AsyncReader(self, self._mailbox)

    def __iter__(self) -> Iterator[list[StepOutput]]:
        return _ThreadReader(self, self._mailbox)

    def __del__(self) -> None:
        self._steps.drop(self._mailbox)


class _Reader:
    """A loop over a request's outputs. Dropped before the end, it drops the request."""

    def __init__(self, request: LiveRequest, mailbox: Mailbox) -> None:
        self._request, self._mailbox = request, mailbox

    def _taken(self) -> list[StepOutput] | None:
        """Return all that has come; None if the request has ended, and all of it was taken."""
        was_over = self._mailbox.is_over  # looked at first: what it put before its end is here then
        outputs = self._mailbox.take()
        return None if was_over and not outputs else outputs

    def __del__(self) -> None:
        self._request._steps.drop(self._mailbox)


class _AsyncReader(_Reader):
    def __aiter__(self) -> "_AsyncReader":
        return self

    async def __anext__(self) -> list[StepOutput]:
        while (outputs := self._taken()) is not None:
            if outputs:
                return outputs
            await self._wait()
        raise StopAsyncIteration

    async def _wait(self) -> None:
        self._request._steps.check_process()
        mailbox, waiter = self._mailbox, LoopWaiter(asyncio.get_running_loop())
        mailbox.announce(waiter)
        try:
            if not mailbox.has_news:
                await waiter.future
        except BaseException:  # a cancellation: the consumer has gone
            self._request.abort()
            raise
        finally:
            mailbox.leave()


class _ThreadReader(_Reader):
    def __iter__(self) -> "_ThreadReader":
        return self

    def __next__(self) -> list[StepOutput]:
        while (outputs := self._taken()) is not None:
            if outputs:
                return outputs
            self._wait()
        raise StopIteration

    def _wait(self) -> None:
        self._request._steps.check_process()
        mailbox, waiter = self._mailbox, ThreadWaiter()
        mailbox.announce(waiter)
        try:
            if not mailbox.has_news:
                waiter.wait()
        except BaseException:  # Ctrl-C
            self._request.abort()
            raise
        finally:
            mailbox.leave()

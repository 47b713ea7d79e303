"""Mailbox: the outputs of one request, between the stepping thread, which puts them, and its reader.

    stepping thread: put ─► items ─► take :the reader
                      └───► waiter        the reader, if it waits

Neither takes a lock. The reader announces itself, then looks at the items once more; the stepping thread puts, then
looks for the reader. So one of them sees the other.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Sequence

from kvpage.serving.loop.outputs import RequestOutput, StepOutput
from kvpage.serving.loop.request import Request


class LoopWaiter:
    """A coroutine that waits in `future`, on `loop`. is_called: whether it will be woken, or was."""

    __slots__ = ("future", "is_called", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.future: asyncio.Future[None] = loop.create_future()
        self.is_called = False


class ThreadWaiter:
    """A thread that waits in `wait`. is_called: as above."""

    __slots__ = ("_lock", "is_called")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self.is_called = False

    def wait(self) -> None:
        """Wait until `wake`. Ctrl-C ends it in the main thread."""
        self._lock.acquire()

    def wake(self) -> None:
        """End the wait. Call it once."""
        self._lock.release()


Waiter = LoopWaiter | ThreadWaiter


class Wakeups:
    """The readers that a step has outputs for. Each event loop gets one call, for all of its coroutines."""

    def __init__(self) -> None:
        self._by_loop: dict[asyncio.AbstractEventLoop, list[LoopWaiter]] = {}

    def add(self, waiter: Waiter) -> None:
        """Wake it: a thread at once, a coroutine at `send`."""
        waiter.is_called = True
        if isinstance(waiter, ThreadWaiter):
            waiter.wake()
        else:
            self._by_loop.setdefault(waiter.loop, []).append(waiter)

    def send(self) -> None:
        """Wake the coroutines. The coroutines of a closed loop are gone: they drop their requests."""
        if not self._by_loop:
            return
        by_loop, self._by_loop = self._by_loop, {}
        for loop, waiters in by_loop.items():
            try:
                loop.call_soon_threadsafe(_wake, waiters)
            except RuntimeError:  # the loop was closed, and its coroutines with it
                continue


def _wake(waiters: Sequence[LoopWaiter]) -> None:
    for waiter in waiters:
        if not waiter.future.done():
            waiter.future.set_result(None)


class Mailbox:
    """The outputs of one request that its reader has not taken yet.

    request: the engine's own record of it; None after its end. keeps_tokens: whether any output but the last is kept.
    output: the outcome, after the end.
    """

    __slots__ = ("_items", "_num_put", "_num_taken", "_waiter", "deadline", "keeps_tokens", "output", "request",
                 "request_id")  # fmt: skip

    def __init__(self, request: Request, keeps_tokens: bool, deadline: float | None) -> None:
        self.request: Request | None = request
        self.request_id, self.keeps_tokens, self.deadline = request.request_id, keeps_tokens, deadline
        self.output: RequestOutput | None = None
        self._items: deque[StepOutput] = deque()
        self._waiter: Waiter | None = None
        self._num_put = self._num_taken = 0  # tokens and log-probabilities; each has one thread that counts

    # --- the stepping thread -----------------------------------------------------------------------------------------

    def put(self, item: StepOutput, wakeups: Wakeups) -> int:
        """Keep an output, and wake the reader if it waits; return how many tokens and log-probabilities are kept."""
        if item.output is None and not self.keeps_tokens:
            return 0
        self._num_put += _size_of(item)
        self._items.append(item)
        if item.output is not None:
            self.output, self.request = item.output, None
        waiter = self._waiter
        if waiter is not None and not waiter.is_called:
            wakeups.add(waiter)
        return self._num_put - self._num_taken

    # --- the reader --------------------------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Whether the request has ended; its last outputs may be here still."""
        return self.output is not None

    @property
    def has_news(self) -> bool:
        """Whether there is something to take, or nothing will come."""
        return bool(self._items) or self.output is not None

    def take(self) -> list[StepOutput]:
        """Return all that is here, in order."""
        items = self._items
        outputs = [items.popleft() for _ in range(len(items))]
        self._num_taken += sum(map(_size_of, outputs))
        return outputs

    def announce(self, waiter: Waiter) -> None:
        """Have the reader woken. RuntimeError if another one waits."""
        if self._waiter is not None:
            raise RuntimeError(f"request {self.request_id!r} must have one reader at a time, another one waits")
        self._waiter = waiter

    def leave(self) -> None:
        """Have the reader woken no more."""
        self._waiter = None


def _size_of(item: StepOutput) -> int:
    """Return a token with its log-probabilities as a number of tokens that take as much memory."""
    return 1 if item.logprobs is None else 2 + len(item.logprobs.top)

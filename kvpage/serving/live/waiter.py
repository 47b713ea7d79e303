"""Waiters: readers that wait for outputs, in a coroutine or a thread; and Wakeups, which wakes all of one step."""

import asyncio
import threading
from collections.abc import Sequence


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
        """Wake the coroutines. Those of a loop that is closed are gone: they drop their requests."""
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

"""Inbox: work that other threads leave for the stepping thread."""

import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from queue import Empty, SimpleQueue

Work = Callable[[], object]
LONG = 1e6
"""Seconds, of which a lock's timeout may not take many more."""


class Inbox:
    """Functions without arguments, first in, first out. Any thread puts, one takes.

    put ─────► queue ─► take       wakes a thread that waits in `wait`
     └───────► bell                ends a step that waits for a store
    leave ───► queue               rings no bell: it takes no lock, so finalizers may call it
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[Work] = SimpleQueue()
        self._bell: Future[None] | None = None

    def put(self, work: Work) -> None:
        """Leave work, and end a wait for other things."""
        self._queue.put(work)
        if self._bell is not None:
            _ring(self._bell)

    def leave(self, work: Work) -> None:
        """Leave work for the next turn; for finalizers, which run amid anything, on any thread."""
        self._queue.put(work)

    def bell(self) -> "Future[None]":
        """Return a future that is done once there is work. Each call replaces the last one's."""
        bell: Future[None] = Future()
        self._bell = bell
        if not self._queue.empty():
            _ring(bell)
        return bell

    def take(self) -> list[Work]:
        """Return the work that is there now."""
        works = []
        with suppress(Empty):
            for _ in range(self._queue.qsize()):
                works.append(self._queue.get_nowait())
        return works

    def wait(self, deadline: float) -> list[Work]:
        """Return work once there is some; none at the deadline, in seconds of time.monotonic()."""
        seconds = max(deadline - time.monotonic(), 0.0)
        try:
            first = self._queue.get(timeout=seconds) if seconds < LONG else self._queue.get()
        except Empty:
            return []
        return [first, *self.take()]


def _ring(bell: "Future[None]") -> None:
    with suppress(InvalidStateError):  # another thread has
        bell.set_result(None)

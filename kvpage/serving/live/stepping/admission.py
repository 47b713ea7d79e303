"""Admission: which requests an AsyncEngine takes, and the order in which work comes to the stepping thread."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvpage.serving.live.errors import EngineClosed, QueueFull
from kvpage.serving.live.stepping.inbox import Inbox, Work

LEAST, MOST = 0.5, 60.0
UNKNOWN = 1.0


class FinishRate:
    """The times at which the last requests ended, on a clock that stands while there are none.

    One thread at a time notes, any thread asks.
    """

    def __init__(self, num_remembered: int = 64) -> None:
        self._times: deque[float] = deque(maxlen=num_remembered)
        self._idle = 0.0  # seconds that the clock stood, until now or until it began to stand
        self._idle_since: float | None = None

    def begin(self, now: float) -> None:
        """Note that there are requests again. now: seconds of time.monotonic()."""
        if self._idle_since is not None:
            self._idle, self._idle_since = self._idle + now - self._idle_since, None

    def note(self, now: float, is_last: bool = False) -> None:
        """Note that a request has ended. is_last: whether there is no other one."""
        self._times.append(now - self._idle)
        if is_last:
            self._idle_since = now

    def seconds_until(self, num_finished: int, now: float | None = None) -> float:
        """Return in how many seconds num_finished more will have finished, between LEAST and MOST."""
        times = self._times.copy()
        if not times:
            return UNKNOWN
        passed = (time.monotonic() if now is None else now) - self._idle - times[0]
        return min(max(num_finished * passed / len(times), LEAST), MOST)


class Admission:
    """The door of an AsyncEngine: open, draining, or closed. Any thread may call it; no finalizer may.

    Work is put into the inbox under the lock. So nothing comes after the work that closes the door. A request goes from
    the inbox into the engine's own queue under the lock, too: it is counted once.

    max_num_waiting: requests that wait at most. rate: when requests end. num_queued: returns how many the engine's own
    queue has.
    """

    def __init__(self, inbox: Inbox, max_num_waiting: int, rate: FinishRate, num_queued: Callable[[], int]) -> None:
        self._inbox, self._max_num_waiting, self._rate = inbox, max_num_waiting, rate
        self._num_queued = num_queued
        self._lock = threading.Lock()
        self._ids: set[str] = set()
        self._reason: str | None = None  # why no more requests are taken
        self._is_closed = False  # for calls, too
        self.num_arriving = 0  # taken, and still in the inbox
        self.num_submitted = self.num_refused = 0

    @property
    def num_unfinished(self) -> int:
        """How many requests were taken and have not ended."""
        return len(self._ids)

    @property
    def takes_requests(self) -> bool:
        """Whether it is open."""
        return self._reason is None

    def check(self, num_more: int = 1) -> None:
        """Raise EngineClosed or QueueFull as `enter` would now.

        num_more: how many would enter.
        """
        with self._lock:
            self._check(num_more)

    def enter(self, request_id: str, work: Work) -> None:
        """Take a request: leave the work that queues it. ValueError if its id is in use; or as `check`."""
        with self._lock:
            self._check(1)
            if request_id in self._ids:
                raise ValueError(f"request_id must not be in use, {request_id!r} is")
            if not self._ids:
                self._rate.begin(time.monotonic())
            self._ids.add(request_id)
            self.num_arriving += 1
            self.num_submitted += 1
            self._inbox.put(work)

    @contextmanager
    def arriving(self) -> Iterator[None]:
        """Have one of the requests go into the engine's own queue meanwhile, or nowhere. Nobody else comes in."""
        with self._lock:
            try:
                yield
            finally:
                self.num_arriving -= 1

    def _check(self, num_more: int) -> None:
        if self._reason is not None:
            raise EngineClosed(self._reason)
        num_waiting = self._num_queued() + self.num_arriving
        if num_waiting + num_more > self._max_num_waiting:
            self.num_refused += 1
            raise QueueFull(num_waiting, self._rate.seconds_until((num_waiting + 1) // 2))

    def leave(self, request_id: str, now: float) -> None:
        """Note that a request has ended. now: seconds of time.monotonic()."""
        with self._lock:
            self._ids.discard(request_id)
            self._rate.note(now, is_last=not self._ids)

    def put(self, work: Work) -> None:
        """Leave other work. EngineClosed if nobody does it any more."""
        with self._lock:
            if self._is_closed:
                raise EngineClosed(self._reason)
            self._inbox.put(work)

    def drain(self, reason: str, work: Work) -> None:
        """Take no more requests, and leave the work that ends those that are here. EngineClosed as `put`."""
        with self._lock:
            if self._is_closed:
                raise EngineClosed(self._reason)
            self._reason = self._reason or reason
            self._inbox.put(work)

    def close(self, reason: str, work: Work | None = None) -> None:
        """Take nothing any more; leave the last work. Closing it twice leaves the work twice."""
        with self._lock:
            if not self._is_closed:
                self._reason = reason
            self._is_closed = True
            if work is not None:
                self._inbox.put(work)

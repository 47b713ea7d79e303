"""Admission: which requests an AsyncEngine takes, and the order in which work comes to the stepping thread."""

import threading
import time

from kvpage.serving.live.errors import EngineClosed, QueueFull
from kvpage.serving.live.stepping.finish_rate import FinishRate
from kvpage.serving.live.stepping.inbox import Inbox, Work


class Admission:
    """The door of an AsyncEngine: open, draining, or closed. Any thread may call it; no finalizer may.

    Work is put into the inbox under the lock. So nothing comes after the work that closes the door.

    max_num_waiting: requests that wait at most. rate: when requests end.
    """

    def __init__(self, inbox: Inbox, max_num_waiting: int, rate: FinishRate) -> None:
        self._inbox, self._max_num_waiting, self._rate = inbox, max_num_waiting, rate
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

    def check(self, num_waiting: int, num_more: int = 1) -> None:
        """Raise EngineClosed or QueueFull as `enter` would now.

        num_waiting: requests in the engine's own queue. num_more: how many would enter.
        """
        if self._reason is not None:
            raise EngineClosed(self._reason)
        num_waiting += self.num_arriving
        if num_waiting + num_more > self._max_num_waiting:
            self.num_refused += 1
            raise QueueFull(num_waiting, self._rate.seconds_until((num_waiting + 1) // 2))

    def enter(self, request_id: str, num_waiting: int, work: Work) -> None:
        """Take a request: leave the work that queues it. ValueError if its id is in use; or as `check`."""
        with self._lock:
            self.check(num_waiting)
            if request_id in self._ids:
                raise ValueError(f"request_id must not be in use, {request_id!r} is")
            if not self._ids:
                self._rate.begin(time.monotonic())
            self._ids.add(request_id)
            self.num_arriving += 1
            self.num_submitted += 1
            self._inbox.put(work)

    def arrived(self) -> None:
        """Note that the engine's own queue has one of the requests."""
        with self._lock:
            self.num_arriving -= 1

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

"""Deadlines: the mailboxes of requests that must end at some time, the next one first."""

import math
from heapq import heapify, heappop, heappush
from itertools import count

from kvpage.serving.live.mailbox import Mailbox


class Deadlines:
    """A heap. Requests that have ended before their deadlines are left out when they are met, or are too many."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Mailbox]] = []
        self._numbers = count()
        self._num_kept = 64

    def add(self, mailbox: Mailbox) -> None:
        """Remember the mailbox's deadline, if it has one."""
        if mailbox.deadline is None:
            return
        heappush(self._heap, (mailbox.deadline, next(self._numbers), mailbox))
        if len(self._heap) > self._num_kept:
            self._heap = [entry for entry in self._heap if not entry[2].is_over]
            heapify(self._heap)
            self._num_kept = max(64, 2 * len(self._heap))

    @property
    def next(self) -> float:
        """The next deadline, in seconds of time.monotonic(); infinity if there is none."""
        while self._heap and self._heap[0][2].is_over:
            heappop(self._heap)
        return self._heap[0][0] if self._heap else math.inf

    def take(self, now: float) -> list[Mailbox]:
        """Return the mailboxes whose deadlines have passed."""
        passed = []
        while self.next <= now:
            passed.append(heappop(self._heap)[2])
        return passed

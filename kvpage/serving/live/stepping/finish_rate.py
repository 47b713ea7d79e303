"""FinishRate: how soon requests finish, by those that have finished last."""

import time
from collections import deque

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
        """Return in how many seconds so many more will have finished, between LEAST and MOST."""
        times = self._times.copy()
        if not times:
            return UNKNOWN
        passed = (time.monotonic() if now is None else now) - self._idle - times[0]
        return min(max(num_finished * passed / len(times), LEAST), MOST)

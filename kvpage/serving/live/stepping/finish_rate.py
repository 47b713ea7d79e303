"""FinishRate: how soon requests finish, by those that have finished last."""

import time
from collections import deque

LEAST, MOST = 0.5, 60.0
UNKNOWN = 1.0


class FinishRate:
    """The times at which the last requests ended. One thread notes, any thread asks."""

    def __init__(self, num_remembered: int = 64) -> None:
        self._times: deque[float] = deque(maxlen=num_remembered)

    def note(self, now: float) -> None:
        """Note that a request has ended. now: seconds of time.monotonic()."""
        self._times.append(now)

    def seconds_until(self, num_finished: int, now: float | None = None) -> float:
        """Return in how many seconds so many more will have finished, between LEAST and MOST."""
        times = self._times.copy()
        if not times:
            return UNKNOWN
        passed = (time.monotonic() if now is None else now) - times[0]
        return min(max(num_finished * passed / len(times), LEAST), MOST)

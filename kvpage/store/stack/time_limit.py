"""TimeLimit: the end of one call on a store, whatever number of records and tiers it asks."""

import math
import time
from typing import NamedTuple


class TimeLimit(NamedTuple):
    """The moment after which a call begins nothing new. end: seconds of time.monotonic(); infinite for no limit."""

    end: float = math.inf

    @classmethod
    def within(cls, seconds: float | None) -> "TimeLimit":
        """Return the limit `seconds` from now; None for no limit."""
        return cls() if seconds is None else cls(time.monotonic() + seconds)

    @property
    def is_over(self) -> bool:
        """Whether the moment has come."""
        return self.end < math.inf and time.monotonic() >= self.end

    def timeout(self, seconds: float | None) -> float | None:
        """Return the seconds that one call of a tier has, which itself may take `seconds`; None for no limit."""
        if self.end == math.inf:
            return seconds
        left = max(self.end - time.monotonic(), 0.0)
        return left if seconds is None else min(left, seconds)


NO_LIMIT = TimeLimit()

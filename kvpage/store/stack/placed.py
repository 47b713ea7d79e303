"""Placed: a tier and its part in a store. TimeLimit: the end of one call on a store, over all its tiers."""

import math
import time
from dataclasses import dataclass
from typing import NamedTuple

from kvpage.store.tiers.tier import Tier


@dataclass(frozen=True, slots=True)
class Placed:
    """A tier and its part in a store.

    Attributes:
        tier: the tier.
        is_written_back: whether it is written in the background, from a faster tier.
        promotes: whether records that slower tiers have are copied here.
        deadline: seconds of a call; None for no limit.
        codec: of records that are put here, such as "split"; "auto" for "split" where reads are so slow that it gains;
            None for the store's own.
    """

    tier: Tier
    is_written_back: bool = False
    promotes: bool = True
    deadline: float | None = None
    codec: str | None = None

    @classmethod
    def of(cls, tier: "Tier | Placed", deadline: float | None) -> "Placed":
        """Return `tier` itself if its part is known, or else the tier with `deadline`: seconds of a call, or None."""
        return tier if isinstance(tier, Placed) else cls(tier, deadline=deadline)


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

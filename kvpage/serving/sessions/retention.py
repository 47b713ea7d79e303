"""Retention: how a session keeps the blocks of its branches between requests. Pause: that it waits for something."""

from dataclasses import dataclass
from typing import Literal, get_args

from kvpage.blocks.pins import PinTerms
from kvpage.checks.values import as_integer, as_real

Tier = Literal["device", "host", "store"]
TIERS: tuple[str, ...] = get_args(Tier)


@dataclass(frozen=True, slots=True)
class Retention:
    """The terms on which blocks are kept. It checks itself.

    Attributes:
        ttl: Seconds from a turn's end on; None for no limit.
        tier: "device"; "host", to which blocks leave at once; or "store", in which case nothing is kept here.
        priority: Where running requests need the room, retained blocks of lower numbers are given up first.

    Raises:
        ValueError: ttl is not positive, or there is no such tier.
        TypeError: A value is of another type.
    """

    ttl: float | None = None
    tier: Tier = "device"
    priority: int = 0

    def __post_init__(self) -> None:
        if self.ttl is not None:
            object.__setattr__(self, "ttl", as_real("ttl", self.ttl))
        object.__setattr__(self, "priority", as_integer("priority", self.priority))
        PinTerms(self.ttl, self.priority)
        if self.tier not in TIERS:
            raise ValueError(f"tier must be one of {', '.join(TIERS)}, got {self.tier!r}")


@dataclass(frozen=True, slots=True)
class Pause:
    """A pause under way.

    Attributes:
        tier: Where its blocks are meanwhile.
        due: Seconds of the sessions' clock when the next request is expected.
        return_at: When the blocks are to come back; None once they have, or where nothing has to.
        keep_seconds: How long they are kept at least, in whichever tier.
    """

    tier: Tier
    due: float
    return_at: float | None
    keep_seconds: float

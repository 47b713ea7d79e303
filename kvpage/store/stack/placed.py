"""Placed: a tier and its part in a store."""

from dataclasses import dataclass

from kvpage.store.tiers.tier import Tier


@dataclass(frozen=True, slots=True)
class Placed:
    """A tier and its part in a store.

    Attributes:
        tier: the tier.
        is_written_back: whether it is written in the background, from a faster tier.
        promotes: whether records that slower tiers have are copied here.
        deadline: seconds of a call; None for no limit.
    """

    tier: Tier
    is_written_back: bool = False
    promotes: bool = True
    deadline: float | None = None

    @classmethod
    def of(cls, tier: "Tier | Placed", deadline: float | None) -> "Placed":
        """Return the tier with its part in a store.

        Args:
            tier: a tier alone, or one whose part is known.
            deadline: seconds of a call of a tier alone; None for no limit.

        Returns:
            `tier` itself if its part is known.
        """
        return tier if isinstance(tier, Placed) else cls(tier, deadline=deadline)

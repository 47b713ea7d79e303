"""Preemptions: how often requests have given their blocks back."""

from typing import NamedTuple


class Preemptions(NamedTuple):
    """How often requests gave their blocks back, and how often they kept computed K and V on the host.

    Both change at once: another thread may read them.
    """

    num: int = 0
    num_swaps: int = 0

    def plus(self, is_swap: bool) -> "Preemptions":
        """Count one more."""
        return Preemptions(self.num + 1, self.num_swaps + is_swap)

"""SlotTier: the state slots of one tier: free, held by a sequence, or a checkpoint.

The order of eviction is one number for each slot; the smallest goes first:

    | kept by a user | priority | worth |
"""

from collections.abc import Iterable

import numpy as np

from kvpage.blocks.hybrid.checkpoint import Checkpoint

NEVER = np.iinfo(np.int64).max
_PRIORITY, _KEPT = 53, 57  # first bits; the worth has those below
_MOST_WORTH = (1 << _PRIORITY) - 1


class SlotTier:
    """Slots 0 to num_slots - 1. Not thread-safe."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.checkpoints: list[Checkpoint | None] = [None] * num_slots
        self._free = list(range(num_slots))[::-1]
        self._order = np.full(num_slots, NEVER, np.int64)

    @property
    def num_free(self) -> int:
        """Number of slots without contents."""
        return len(self._free)

    @property
    def num_checkpoints(self) -> int:
        """Number of slots that are checkpoints."""
        return sum(one is not None for one in self.checkpoints)

    @property
    def free_slots(self) -> tuple[int, ...]:
        """The slots without contents."""
        return tuple(self._free)

    def take(self) -> int:
        """Return a free slot, which there must be."""
        return self._free.pop()

    def take_this(self, slot: int) -> None:
        """Take one free slot out of all."""
        self._free.remove(slot)

    def release(self, slot: int) -> None:
        """Make a slot free that is no checkpoint."""
        self._free.append(slot)

    def keep(self, checkpoint: Checkpoint) -> None:
        """Note that the checkpoint's slot has its state."""
        self.checkpoints[checkpoint.slot] = checkpoint

    def forget(self, checkpoint: Checkpoint) -> None:
        """Note that the slot is no checkpoint any more. It is not free yet."""
        self.checkpoints[checkpoint.slot] = None
        self._order[checkpoint.slot] = NEVER

    def rank(self, checkpoint: Checkpoint) -> None:
        """Set the checkpoint's place in the order of eviction. One that is held has none."""
        self._order[checkpoint.slot] = NEVER if checkpoint.num_holds else rank_of(checkpoint)

    def victim(self, besides: int | None = None, kept: Iterable[int] = ()) -> Checkpoint | None:
        """Return the checkpoint to evict first.

        Args:
            besides: A slot that is not to be evicted.
            kept: Slots that are evicted only where no other can be.

        Returns:
            The checkpoint; None if there is none.
        """
        if not self.num_slots:
            return None
        order = self._order
        kept = list(kept)
        if besides is not None or kept:
            order = order.copy()
            order[kept] = np.where(order[kept] == NEVER, NEVER, order[kept] | 1 << _KEPT)
            order[[] if besides is None else besides] = NEVER
        first = int(order.argmin())
        return self.checkpoints[first] if order[first] != NEVER else None


def rank_of(checkpoint: Checkpoint) -> int:
    """Return the checkpoint's place in the order of eviction of its tier, where no user keeps it."""
    return min(checkpoint.worth, _MOST_WORTH) | checkpoint.priority << _PRIORITY

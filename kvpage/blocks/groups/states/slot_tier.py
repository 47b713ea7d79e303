"""SlotTier: the state slots of one tier: free, held by a sequence, or a checkpoint.

The order of eviction is one number for each checkpoint; the smallest goes first:

    | priority | worth |

The pool counts references: a reader of a checkpoint has one beside the tier's. While it has, no one evicts the slot.
"""

from collections.abc import Iterable

from kvpage._C import SlotPool
from kvpage.blocks.groups.states.checkpoint import Checkpoint

_PRIORITY = 53  # first bit; the worth has those below
_MOST_WORTH = (1 << _PRIORITY) - 1


class SlotTier:
    """Slots 0 to num_slots - 1. Not thread-safe."""

    def __init__(self, num_slots: int) -> None:
        self.pool = SlotPool(num_slots)
        self.checkpoints: list[Checkpoint | None] = [None] * num_slots

    @property
    def num_slots(self) -> int:
        """Number of slots of the tier."""
        return self.pool.num_slots

    @property
    def num_free(self) -> int:
        """Number of slots without contents."""
        return self.pool.num_free

    @property
    def num_checkpoints(self) -> int:
        """Number of slots that are checkpoints."""
        return self.pool.num_ranked

    @property
    def free_slots(self) -> tuple[int, ...]:
        """The slots without contents."""
        return tuple(self.pool.free_slots)

    def take(self) -> int:
        """Return a free slot. Raise OutOfSlots where there is none."""
        return self.pool.allocate()

    def take_this(self, slot: int) -> None:
        """Take one free slot out of all."""
        self.pool.occupy(slot)

    def release(self, slot: int) -> None:
        """End a reference to a slot, which is free after the last one."""
        self.pool.release(slot)

    def keep(self, checkpoint: Checkpoint) -> None:
        """Note that the checkpoint's slot has its state."""
        self.checkpoints[checkpoint.slot] = checkpoint
        self.rank(checkpoint)

    def forget(self, checkpoint: Checkpoint) -> None:
        """Note that the slot is no checkpoint any more. It is not free yet."""
        self.checkpoints[checkpoint.slot] = None
        self.pool.unrank(checkpoint.slot)

    def rank(self, checkpoint: Checkpoint) -> None:
        """Set the checkpoint's place in the order of eviction."""
        self.pool.rank(checkpoint.slot, rank_of(checkpoint))

    def victim(self, besides: int | None = None, kept: Iterable[int] = ()) -> Checkpoint | None:
        """Return the checkpoint to evict first.

        Returns:
            The checkpoint; None if there is none. One with a reader is none.
        """
        first = self.pool.victim(-1 if besides is None else besides, list(kept))
        return self.checkpoints[first] if first >= 0 else None


def rank_of(checkpoint: Checkpoint) -> int:
    """Return the checkpoint's place in the order of eviction of its tier, where no user keeps it."""
    return min(checkpoint.worth, _MOST_WORTH) | checkpoint.priority << _PRIORITY

"""SlotPool: state slots."""

import random
from typing import Any

from fuzz_case import Case, World

from kvpage import _C
from kvpage.checks.errors import OutOfSlots

NUM_SLOTS = 6


class StateSlotWorld(World):
    """Slots of one tier."""

    covers = ("kvpage._C.SlotPool",)

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.pool = rng, _C.SlotPool(NUM_SLOTS)

    def snapshot(self) -> object:
        counts = [self.pool.ref_count(slot) for slot in range(NUM_SLOTS)]
        return counts, self.pool.free_slots, self.pool.num_ranked, self.pool.victim()

    def check(self) -> None:
        self.pool.check()
        assert self.pool.num_free == len(self.pool.free_slots)

    def case(self, rng: random.Random) -> Case:
        slot = rng.randrange(NUM_SLOTS)
        by_slot = ("occupy", "share", "release", "ref_count", "unrank")
        makers = (
            lambda: self._of(self.pool, "allocate", {}, OutOfSlots),
            lambda: self._of(self.pool, rng.choice(by_slot), {"slot": slot}),
            lambda: self._of(self.pool, "rank", {"slot": slot, "rank": rng.randrange(-9, 2**40)}),
            lambda: self._of(self.pool, "victim", {"besides": slot, "kept": [slot]}),
        )
        return rng.choice(makers)()

    def _of(self, owner: Any, name: str, args: dict[str, Any], error: type[Exception] = ValueError) -> Case:
        return Case(f"{type(owner).__name__}.{name}", getattr(owner, name), args, may_raise=(error,))

"""SlotPool and AnchorTable: state slots, and the blocks that checkpoints stand on."""

import random
from typing import Any

import numpy as np
from fuzz_case import Case, World

from kvpage import _C, BlockPool
from kvpage.checks.errors import OutOfSlots

NUM_SLOTS, NUM_BLOCKS, MOST = 6, 5, 4


class StateSlotWorld(World):
    """Slots of one tier, and a table over blocks of two tiers, of which some are taken."""

    covers = ("kvpage._C.SlotPool", "kvpage._C.AnchorTable")

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.pool = rng, _C.SlotPool(NUM_SLOTS)
        self.blocks = BlockPool(NUM_BLOCKS), BlockPool(NUM_BLOCKS)
        self.table = _C.AnchorTable(*self.blocks, MOST)
        self.taken = [tier.allocate(rng.randrange(NUM_BLOCKS)) for tier in self.blocks]
        self.anchors: set[int] = set()

    def snapshot(self) -> object:
        counts = [self.pool.ref_count(slot) for slot in range(NUM_SLOTS)]
        uses = [(anchor, self.table.uses_of(anchor)) for anchor in sorted(self.anchors)]
        return counts, self.pool.free_slots, self.pool.num_ranked, self.pool.victim(), uses, self.table.stale()

    def check(self) -> None:
        self.pool.check()
        self.table.check()
        assert self.pool.num_free == len(self.pool.free_slots)

    def case(self, rng: random.Random) -> Case:
        slot, anchor = rng.randrange(NUM_SLOTS), rng.randrange(MOST)
        ids = {"device_id": rng.randrange(-1, NUM_BLOCKS), "host_id": rng.randrange(-1, NUM_BLOCKS)}
        path = np.array([[rng.randrange(-1, NUM_BLOCKS) for _ in range(3)] for _ in range(2)], np.int32)
        pairs = np.array([[rng.randrange(NUM_BLOCKS), rng.randrange(NUM_BLOCKS)]], np.int64)
        by_slot = ("occupy", "share", "release", "ref_count", "unrank")
        makers = (
            lambda: self._of(self.pool, "allocate", {}, OutOfSlots),
            lambda: self._of(self.pool, rng.choice(by_slot), {"slot": slot}),
            lambda: self._of(self.pool, "rank", {"slot": slot, "rank": rng.randrange(-9, 2**40)}),
            lambda: self._of(self.pool, "victim", {"besides": slot, "kept": [slot]}),
            lambda: Case("anchors.add", self._add, {"has_block": True}, may_raise=(ValueError,)),
            lambda: Case("anchors.remove", self._remove, {"anchor": anchor}, may_raise=(ValueError,)),
            lambda: self._of(self.table, "learn", {"anchor": anchor, **ids}),
            lambda: self._of(self.table, "find", ids),
            lambda: self._of(self.table, "find_last", {"ids": path, "end": rng.randrange(4)}),
            lambda: self._of(self.table, "move", {"pairs": pairs, "to_host": rng.random() < 0.5}),
            lambda: self._of(self.table, rng.choice(("is_valid", "uses_of")), {"anchor": anchor}),
            lambda: self._of(self.table, "is_current", {"tier": 0, "block_id": slot % NUM_BLOCKS, "generation": 1}),
        )
        return rng.choice(makers)()

    def _of(self, owner: Any, name: str, args: dict[str, Any], error: type[Exception] = ValueError) -> Case:
        return Case(f"{type(owner).__name__}.{name}", getattr(owner, name), args, may_raise=(error,))

    def _add(self, has_block: Any) -> int:
        anchor = self.table.add(has_block)
        self.anchors.add(anchor)
        return anchor

    def _remove(self, anchor: Any) -> None:
        self.table.remove(anchor)
        self.anchors.discard(int(anchor))

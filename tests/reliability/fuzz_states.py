"""StateCache: pairs of slots of every kind, and parts."""

import random
from typing import Any

import torch
from fuzz_case import Case, World

from kvpage import StateCache, StateLayout, StatePart
from kvpage.blocks.moves import BlockMove

CONV = StatePart(0, "conv", 0, (5, 3), torch.bfloat16)
RECURRENT = StatePart(2, "recurrent", 0, (2, 4), torch.float32)
LAYOUT = StateLayout.of_parts([CONV, RECURRENT])
NUM_SLOTS, NUM_HOST_SLOTS = 6, 4


class StateCacheWorld(World):
    """Slots of random bytes in both tiers. Every byte of both is compared with what the pairs make of it."""

    covers = ("kvpage.StateCache",)

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.cache = rng, StateCache(LAYOUT, NUM_SLOTS, NUM_HOST_SLOTS)
        generator = torch.Generator().manual_seed(rng.getrandbits(32))
        for slots in (self.cache.slots, self.cache.host_slots):
            slots.copy_(torch.randint(0, 256, slots.shape, generator=generator, dtype=torch.uint8))

    def snapshot(self) -> object:
        return self.cache.slots.numpy().tobytes(), self.cache.host_slots.numpy().tobytes()

    def check(self) -> None:
        assert self.cache.slots.shape == (NUM_SLOTS, LAYOUT.slot_bytes)
        assert self.cache.host_slots.shape == (NUM_HOST_SLOTS, LAYOUT.slot_bytes)

    def case(self, rng: random.Random) -> Case:
        name = rng.choice(("copy", "swap_out", "swap_in", "part", "make"))
        if name == "part":
            return self._part()
        if name == "make":
            args = {"layout": LAYOUT, "num_slots": 2, "num_host_slots": 1, "device": "cpu", "calibration": None}
            return Case("StateCache", make_cache, args)
        return self._copies(name)

    def _copies(self, name: str) -> Case:
        device, host = self.cache.slots, self.cache.host_slots
        source, target = {"copy": (device, device), "swap_out": (device, host), "swap_in": (host, device)}[name]
        pairs = self._pairs(len(source), len(target), name == "copy")
        is_move = self.rng.random() < 0.3
        if is_move:
            return Case("StateCache.do_move", self._do_move, {"kind": name, "pairs": pairs.numpy()})
        return Case(f"StateCache.{name}", getattr(self.cache, name), {"pairs": pairs})

    def _do_move(self, kind: Any, pairs: Any) -> None:
        self.cache.do_move(BlockMove(kind, pairs))

    def _pairs(self, num_src: int, num_dst: int, in_one_tier: bool) -> torch.Tensor:
        """In one tier no slot is read by one pair and written by another."""
        targets = self.rng.sample(range(num_dst), self.rng.randrange(num_dst + 1))
        sources = [slot for slot in range(num_src) if not (in_one_tier and slot in targets)]
        targets = targets if sources else []
        chosen = [self.rng.choice(sources) for _ in targets]
        return torch.tensor([chosen, targets], dtype=torch.int64).t().contiguous()

    def _part(self) -> Case:
        part = self.rng.choice(LAYOUT.parts)
        return Case("StateCache.part", self.cache.part, {"part": part})


def make_cache(**given: Any) -> Any:
    """Sizes that are allowed and do not fit into the machine are no finding, nor is a machine without a GPU."""
    if str(given.get("device")).startswith("cuda"):
        return None
    for name in ("num_slots", "num_host_slots"):
        size = given.get(name)
        if type(size) is int and size > 10**6:
            return None
    return StateCache(**given)

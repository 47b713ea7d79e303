"""SlotPool: who has which state slot, which one is evicted first, and that a refused call changes nothing."""

import random
from collections.abc import Callable

import pytest

from kvpage._C import SlotPool
from kvpage.checks.errors import OutOfSlots


class NaivePool:
    """The same, as lists and sorted."""

    def __init__(self, num_slots: int) -> None:
        self.counts = [0] * num_slots
        self.ranks: list[int | None] = [None] * num_slots
        self.free = list(range(num_slots))[::-1]

    def allocate(self) -> int:
        if not self.free:
            raise OutOfSlots(1, 0)
        self.counts[self.free[-1]] = 1
        return self.free.pop()

    def occupy(self, slot: int) -> None:
        if slot not in self.free:
            raise ValueError(slot)
        self.free.remove(slot)
        self.counts[slot] = 1

    def share(self, slot: int) -> None:
        self._in_use(slot)
        self.counts[slot] += 1

    def release(self, slot: int) -> None:
        self._in_use(slot)
        if self.counts[slot] == 1:
            if self.ranks[slot] is not None:
                raise ValueError(slot)
            self.free.append(slot)
        self.counts[slot] -= 1

    def rank(self, slot: int, rank: int) -> None:
        self._in_use(slot)
        self.ranks[slot] = rank

    def unrank(self, slot: int) -> None:
        if not 0 <= slot < len(self.ranks) or self.ranks[slot] is None:
            raise ValueError(slot)
        self.ranks[slot] = None

    def victim(self, besides: int, kept: list[int]) -> int:
        fits = [
            (slot in kept, rank, slot)
            for slot, rank in enumerate(self.ranks)
            if rank is not None and self.counts[slot] == 1 and slot != besides
        ]
        return min(fits)[2] if fits else -1

    def _in_use(self, slot: int) -> None:
        if not 0 <= slot < len(self.counts) or not self.counts[slot]:
            raise ValueError(slot)


def outcome(call: Callable[[], object]) -> object:
    try:
        return call()
    except (OutOfSlots, ValueError) as error:
        return type(error)


@pytest.mark.parametrize("num_slots", [0, 1, 2, 7, 8, 9])
@pytest.mark.parametrize("seed", range(3))
def test_random_operations_beside_the_naive_pool(num_slots: int, seed: int) -> None:
    rng, pool, naive = random.Random(seed), SlotPool(num_slots), NaivePool(num_slots)
    for _ in range(400):
        slot = rng.randrange(-1, num_slots + 1)
        name = rng.choice(("allocate", "allocate", "occupy", "share", "release", "release", "rank", "rank", "unrank"))
        args = () if name == "allocate" else (slot, rng.randrange(4)) if name == "rank" else (slot,)
        found = outcome(lambda name=name, args=args: getattr(pool, name)(*args))
        assert found == outcome(lambda name=name, args=args: getattr(naive, name)(*args)), (name, args)
        besides = rng.randrange(-1, num_slots)
        kept = [] if rng.random() < 0.5 else rng.sample(range(num_slots), rng.randrange(num_slots + 1))
        assert pool.victim(besides, kept) == naive.victim(besides, kept)
        pool.check([slot for slot, count in enumerate(naive.counts) for _ in range(count)])
        assert [pool.ref_count(slot) for slot in range(num_slots)] == naive.counts
        assert (pool.num_free, pool.free_slots) == (len(naive.free), naive.free)
        assert pool.num_ranked == sum(rank is not None for rank in naive.ranks)


REFUSED = [
    ("occupy", (2,), "between 0 and num_slots - 1 = 1, got 2"),
    ("occupy", (0,), "cannot occupy slot 0: it is not free"),
    ("share", (1,), "cannot share slot 1: it is free"),
    ("release", (1,), "cannot release slot 1: it is free"),
    ("release", (0,), "cannot release slot 0: it has a rank"),
    ("rank", (1, 0), "cannot rank slot 1: it is free"),
    ("unrank", (1,), "cannot unrank slot 1: it has no rank"),
    ("ref_count", (-1,), "got -1"),
    ("victim", (2,), "besides must be between 0 and num_slots - 1 = 1, got 2"),
    ("victim", (0, [0, -1]), "kept must be between 0 and num_slots - 1 = 1, got -1"),
    ("check", ([0, 2],), "owned must be between 0 and num_slots - 1 = 1, got 2"),
]


@pytest.mark.parametrize(("verb", "args", "message"), REFUSED)
def test_errors_name_the_rule(verb: str, args: tuple[object, ...], message: str) -> None:
    pool = SlotPool(2)
    pool.rank(pool.allocate(), 7)
    with pytest.raises(ValueError, match=message):
        getattr(pool, verb)(*args)
    pool.check([0])
    assert (pool.victim(), pool.free_slots) == (0, [1])


@pytest.mark.parametrize("num_slots", [-1, 2**30])
def test_num_slots_is_checked(num_slots: int) -> None:
    with pytest.raises(ValueError, match=f"num_slots must be between 0 and .*, got {num_slots}"):
        SlotPool(num_slots)


@pytest.mark.parametrize("owned", [[], [0, 0, 1], [0, 1, 1]])
def test_a_reference_without_an_owner_is_found(owned: list[int]) -> None:
    pool = SlotPool(3)
    pool.allocate(), pool.allocate()
    pool.check([0, 1])
    with pytest.raises(RuntimeError, match=r"slot \d has 1 references and \d owners"):
        pool.check(owned)

"""RecordOrder beside sorted lists: what goes next in a tier of a store, by each policy."""

import random
from itertools import pairwise

import pytest
from support.naive_order import NaiveOrder
from support.seeds import replay, seed_of

from kvpage import _C

ALL = 10_000


class OrderLife:
    """Random records at random times. Times are whole seconds, so that no two uses are at once."""

    def __init__(self, seed: int, policy: str) -> None:
        self.rng, self.order, self.naive = random.Random(seed), _C.RecordOrder(policy), NaiveOrder(policy)

    def do(self) -> None:
        self.order.set_time(float(self.naive.now + 1))
        action, places = self.rng.random(), self.naive.victims()
        if action < 0.3 or not places:
            self.naive.add(self.order.add())
        elif action < 0.8:
            place = self.rng.choice(places)
            self.order.use(place)
            self.naive.use(place)
        else:
            place = self.rng.choice(places)
            self.order.remove(place, self.rng.random() < 0.5)
            self.naive.remove(place)


@pytest.mark.parametrize("policy", _C.eviction_policies())
def test_a_life_beside_sorting(policy):
    life = OrderLife(seed_of(len(policy)), policy)
    for _ in range(500):
        life.do()
        walk, num_first = life.order.walk(), life.rng.randrange(4)
        walked = walk.take(num_first)
        assert walked == life.naive.victims()[:num_first], replay()
        assert walked + walk.take(ALL) == life.naive.victims(), replay()
        assert walk.take(1) == [] and len(life.order) == len(life.naive.born)
        life.order.check()


def test_cost_learns_which_records_are_read_again():
    """Records that were read once are read again after 3 seconds; others never are. An old one of those stays."""
    order, read = _C.RecordOrder("cost"), list[tuple[int, int]]()
    for now in range(1500):
        order.set_time(float(now))
        while read and read[0][0] <= now - 3:
            order.use(read[0][1])
            read.append((now, read.pop(0)[1]))
        if now < 4:
            read.append((now, order.add()))
            order.use(read[-1][1])
        order.add()
        for place in order.walk().take(max(len(order) - 20, 0)):
            order.remove(place, True)
    assert {place for _, place in read} <= set(order.walk().take(ALL)[-4:])


@pytest.mark.parametrize("policy", _C.eviction_policies())
def test_records_of_another_age(policy):
    """Those that were found on a disk: only a policy that heeds time sorts them by their ages."""
    order = _C.RecordOrder(policy)
    order.set_time(1000.0)
    places = [order.add(age) for age in (5.0, 50.0, 0.5)]
    by_age = [places[1], places[0], places[2]]
    assert order.walk().take(ALL) == (by_age if policy == "cost" else places)


def test_wrong_calls_change_nothing():
    order = _C.RecordOrder("lru")
    places = [order.add() for _ in range(3)]
    order.remove(places[1])
    for place in (places[1], 3, -1):
        for call in (order.use, order.remove):
            with pytest.raises(ValueError, match=f"place must be that of a record, got {place}"):
                call(place)
    for age in (-1.0, 1e9, float("nan")):
        with pytest.raises(ValueError, match="age must be between 0 and"):
            order.add(age)
    with pytest.raises(TypeError):
        order.use("a")
    with pytest.raises(ValueError, match="policy must be one of lru, slru, lfu, fifo, cost, got 'mru'"):
        _C.RecordOrder("mru")
    assert order.walk().take(ALL) == [places[0], places[2]] and order.policy == "lru"
    order.check()


@pytest.mark.parametrize("change", ["add", "use", "remove"])
def test_a_walk_ends_with_a_change(change):
    order = _C.RecordOrder("slru")
    place = [order.add() for _ in range(3)][0]
    walk = order.walk()
    assert len(walk.take(1)) == 1
    with pytest.raises(ValueError, match="count must not be negative, got -1"):
        walk.take(-1)
    getattr(order, change)(*([] if change == "add" else [place]))
    with pytest.raises(ValueError, match="an order must not change while it is walked over"):
        walk.take(1)


def test_a_walk_keeps_its_order():
    order = _C.RecordOrder("lfu")
    places = [order.add() for _ in range(3)]
    walk = order.walk()
    del order
    assert walk.take(ALL) == places


def test_free_places_are_handed_out_again():
    order = _C.RecordOrder("fifo")
    places = [order.add() for _ in range(100)]
    for place in places:
        order.remove(place)
    again = [order.add() for _ in range(100)]
    assert sorted(again) == sorted(places) and order.walk().take(ALL) == again
    assert all(a != b for a, b in pairwise(again))

"""Damage in every tier: whatever byte of a record is changed, its key is a miss, and no other is."""

import random

from support.byte_stores import data_of, key_of, opened, room
from support.insides import entries_of, names_of
from support.store_kv import corrupt

from kvpage.store.tiers.memory_tier import MemoryTier

SIZE, NUM = 9000, 24
KEYS, RECORDS = [key_of(n) for n in range(NUM)], [data_of(n, SIZE) for n in range(NUM)]


def check_all(store, damaged: set[int]) -> None:
    rooms = [room(SIZE) for _ in KEYS]
    found = store.get_into(KEYS, rooms)
    assert found == [number not in damaged for number in range(NUM)]
    assert all(one == RECORDS[number] for number, one in enumerate(rooms) if found[number])


def test_any_changed_byte_in_memory_is_a_miss() -> None:
    tier, rng = MemoryTier(1 << 20, pin_memory=False), random.Random(3)
    with opened(tier) as store:
        assert all(store.put(KEYS, RECORDS))
        names = names_of(store, KEYS)
        num_bytes = entries_of(tier)[names[0]].num_bytes
        places = [0, 1, 111, 112, 500, num_bytes - 17, num_bytes - 1, *rng.sample(range(num_bytes), NUM - 8)]
        for name, at in zip(names, places, strict=False):
            corrupt(tier, name, at)
        check_all(store, set(range(len(places))))
        assert store.stats().corrupt_records == len(places) and tier.stats().num_records == NUM - len(places)
        assert all(store.put(KEYS, RECORDS))
        check_all(store, set())

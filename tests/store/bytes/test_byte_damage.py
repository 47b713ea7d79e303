"""Damage in every tier: whatever byte of a record is changed, its key is a miss, and no other is."""

import random
from pathlib import Path

from support.byte_stores import data_of, disk, key_of, opened, room
from support.insides import entries_of, names_of, stack_of
from support.store_kv import corrupt

from kvpage.store import inspection
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


def test_changed_bytes_on_disk_are_misses_of_an_open_store_and_of_the_next(tmp_path: Path) -> None:
    with opened(disk(tmp_path)) as store:
        assert all(store.put(KEYS, RECORDS))
        (path,) = tmp_path.glob("*.segment")
        data = bytearray(path.read_bytes())
        for number in range(0, NUM, 2):
            data[data.index(RECORDS[number][:64]) + 350 * number] ^= 0x10
        path.write_bytes(data)
        check_all(store, set(range(0, NUM, 2)))
    with opened(disk(tmp_path)) as store:
        check_all(store, set(range(0, NUM, 2)))
        assert all(store.put(KEYS, RECORDS))
        check_all(store, set())
        tier = stack_of(store).tiers[0].tier
        assert {one.model for one in inspection.summaries(tier)} == {"(bytes)"}
        assert inspection.verify(tier) == (NUM, [])

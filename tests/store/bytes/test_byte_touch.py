"""ByteStore.touch: a use without a read, in memory and on disk, by each policy; nothing else changes."""

from pathlib import Path

import pytest
from support.byte_stores import disk, opened, room
from support.insides import names_of
from support.store_kv import Troubled

from kvpage.store import ByteStore
from kvpage.store.tiers.memory_tier import MemoryTier

SIZE = 17000  # three fit into 64 KiB
KEYS = [b"a", b"b", b"c", b"d"]


def fill(store: ByteStore) -> None:
    for key in KEYS[:3]:
        assert store.put([key], [key * SIZE]) == [True]


@pytest.mark.parametrize("is_later", [False, True])
@pytest.mark.parametrize(("policy", "goes"), [("lru", b"b"), ("lfu", b"b"), ("fifo", b"a"), ("cost", b"b")])
@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_what_was_touched_goes_later(kind: str, policy: str, goes: bytes, is_later: bool, tmp_path: Path) -> None:
    url = "memory://?size=64KiB" if kind == "memory" else disk(tmp_path, "64KiB").replace("8MiB", "64KiB")
    with opened(f"{url}&policy={policy}") as store:
        fill(store)
        assert store.touch([]) == []
        keys = [b"a", b"none", b"c", b"a"]
        found = store.later.touch(keys).result() if is_later else store.touch(keys)
        assert found == [True, False, True, True]
        before = store.stats().tiers[0]
        assert (before.hits, before.misses, before.read_bytes) == (0, 0, 0)
        assert store.put([b"d"], [b"d" * SIZE]) == [True]
        there = store.contains(KEYS)
        assert there == [key != goes for key in KEYS]
        for key, is_there in zip(KEYS, there, strict=True):
            one = room(SIZE)
            assert store.get_into([key], [one]) == [is_there] and (not is_there or one == key * SIZE)


def test_each_tier_notes_it_and_one_in_trouble_does_not() -> None:
    tiers = [MemoryTier(64 << 10, pin_memory=False, name=name) for name in ("fast", "slow")]
    with opened(*tiers) as store:
        fill(store)
        tiers[0].clear()
        assert store.touch([b"a"]) == [True]
        assert next(iter(tiers[1]._order.victims())) == names_of(store, [b"b"])[0]
    with opened(Troubled(lambda: True)) as store:
        assert store.touch([b"a", b"b"]) == [False, False] and store.stats().tier_errors == 1
    with opened() as store:
        store.put([b"a"], [b"1"])
        assert store.touch([b"a"], deadline=0) == [False] and store.touch([b"a"], deadline=60) == [True]
        with pytest.raises(TypeError, match="keys"):
            store.touch([1])

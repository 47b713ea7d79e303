"""The bytes that a disk tier takes: few more than its records have, and those of the last removed ones come back."""

import errno
import os
import random
from pathlib import Path

import pytest
import torch
from support.disk_faults import faulty
from support.store_records import get, key, put

from kvpage.store import KVStore, KVStoreConfig, KVStoreMetadata
from kvpage.store.disk import segment as disk_segment
from kvpage.store.disk.disk_tier import SLOT_BYTES, DiskTier
from kvpage.store.disk.disk_view import DiskView
from kvpage.store.disk.journal import Place
from kvpage.store.disk.segment import HEADER_BYTES, Segment, punch_hole
from kvpage.store.tiers.tier import TierError

SEGMENT_BYTES, CAPACITY = 8 << 20, 64 << 20
LEAST = 64 << 10  # of a segment, and of what it grows by


def make(path: Path, **fields) -> DiskTier:
    return DiskTier([path], CAPACITY, segment_bytes=SEGMENT_BYTES, **fields)


def taken(path: Path) -> int:
    """The bytes of the segments: of their blocks on the disk or of their lengths, whichever are more."""
    states = [file.stat() for file in path.glob("*.segment")]
    return max(on_disk(path), sum(state.st_size for state in states))


def on_disk(path: Path) -> int:
    return sum(file.stat().st_blocks * 512 for file in path.glob("*.segment"))


def allowed(path: Path, sizes: list[int]) -> float:
    """1.1 times the slots of the records, and for each segment the least."""
    num_slots = sum(-(-(HEADER_BYTES + size) // SLOT_BYTES) for size in sizes)
    return 1.1 * num_slots * SLOT_BYTES + LEAST * len(list(path.glob("*.segment")))


@pytest.mark.parametrize("size", [1, SLOT_BYTES, 100_000, 1 << 20, 5 << 20])
def test_records_of_one_size(tmp_path: Path, size: int) -> None:
    """From the first record on, over several segments, and as they are opened again."""
    tier, data = make(tmp_path), bytes(size)
    for n in range(min(200, CAPACITY // 2 // size)):
        assert put(tier, {key(n): data}) == [True]
        tier.flush(sync=True)
        assert taken(tmp_path) <= allowed(tmp_path, [size] * (n + 1))
    tier.close()
    before = taken(tmp_path)
    tier = make(tmp_path)
    assert tier.stats().num_records == n + 1 and tier.stats().corrupted == 0 and taken(tmp_path) == before
    tier.check()


def test_records_of_many_sizes(tmp_path: Path) -> None:
    tier, rng, sizes = make(tmp_path), random.Random(3), []
    for n in range(60):
        sizes.append(rng.choice([1, 4000, 70_000, 600_000, 1_500_000]))
        assert put(tier, {key(n): rng.randbytes(sizes[-1])}) == [True]
        assert taken(tmp_path) <= allowed(tmp_path, sizes)
    tier.check()


@pytest.mark.parametrize("codec", ["raw", "split"])
@pytest.mark.parametrize("num_tokens", [32, 1000])
def test_a_prompt(tmp_path: Path, codec: str, num_tokens: int) -> None:
    kv = torch.randn(4, 2, num_tokens, 4, 64).bfloat16()
    config = KVStoreConfig(32, (f"disk://{tmp_path}?size=1GiB",), codec=codec)
    with KVStore(config, KVStoreMetadata("m", kv_dtype=torch.bfloat16)) as store:
        store.store(list(range(num_tokens)), kv)
        store.flush()
        sizes = [record.num_bytes for record in store.records()]
    assert sum(sizes) > 0 and taken(tmp_path) <= allowed(tmp_path, sizes)


def test_a_full_tier_keeps_to_its_capacity(tmp_path: Path) -> None:
    """Records as large as a segment find a place among those that evict each other, whatever was there before."""
    tier, rng = DiskTier([tmp_path], 3 << 20, segment_bytes=1 << 20), random.Random(4)
    largest = (1 << 20) - SLOT_BYTES - HEADER_BYTES
    for n in range(300):
        data = rng.randbytes(rng.choice([1, 5000, 200_000, 600_000, largest]))
        assert put(tier, {key(n): data}) == [True] and get(tier, [key(n)]) == [data]
        assert taken(tmp_path) <= 3 << 20
        tier.check()
    assert tier.create(key(300), largest + 1) is None


def test_a_view_follows_a_segment_that_grows(tmp_path: Path) -> None:
    """Its owner writes past the end that the file had when it was looked into."""
    tier, data = make(tmp_path), bytes(range(256)) * 1000
    assert put(tier, {key(0): data}) == [True]
    view = DiskView([tmp_path])
    (space,) = tier._allocator.directories[0].spaces
    for n in range(1, 10):
        assert put(tier, {key(n): data}) == [True]
        (reader,) = tier.open([key(n)])
        view.look_at(tmp_path, Place(space.segment.id, 0, reader._entry.run.slot))
        reader.close()
    assert get(view, [key(n) for n in range(10)]) == [data] * 10 and view.stats().corrupted == 0
    assert get(DiskView([tmp_path]), [key(9)]) == [data]


@pytest.mark.parametrize("half", [False, True])
def test_a_disk_that_becomes_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, half: bool) -> None:
    """A segment that cannot grow is as it was, and its records make room for others."""
    tier = make(tmp_path, retry_seconds=3600)
    data = bytes(200_000)
    assert put(tier, {key(0): data}) == [True]
    tier.close()
    tier = make(tmp_path, retry_seconds=3600)
    before = taken(tmp_path)

    def fails(name: str, arguments: tuple) -> bool:
        return (name == "pwrite" and arguments[2] >= before) if half else name == "posix_fallocate"

    with faulty(monkeypatch, fails, errno.ENOSPC, half):
        assert put(tier, {key(1): data}) == [True]
        assert taken(tmp_path) == before and tier.contains([key(0), key(1)]) == [False, True]
        tier.check()
    tier.close()
    tier = make(tmp_path)
    assert get(tier, [key(1)]) == [data] and tier.stats().corrupted == 0
    assert put(tier, {key(2): data}) == [True] and get(tier, [key(1)]) == [data]
    tier.check()


@pytest.mark.parametrize("num_bytes", [0, 1, SLOT_BYTES])
def test_a_growth_that_was_cut_off(tmp_path: Path, num_bytes: int) -> None:
    """The process died between two calls: part of the new end is there, with its header or without."""
    tier = make(tmp_path)
    assert put(tier, {key(0): bytes(200_000)}) == [True]
    segment = tier._allocator.directories[0].spaces[0].segment
    end = segment.num_slots * SLOT_BYTES
    if num_bytes == SLOT_BYTES:
        segment.lengthen(segment.num_slots + 16)
    tier.close()
    os.truncate(tmp_path / "0000.segment", end + num_bytes)
    tier = make(tmp_path)
    assert get(tier, [key(0)]) == [bytes(200_000)] and tier.stats().corrupted == 0
    tier.check()
    assert put(tier, {key(1): bytes(700_000)}) == [True]
    tier.check()
    tier.close()
    tier = make(tmp_path)
    assert tier.stats().num_records == 2 and tier.stats().corrupted == 0
    tier.check()


def has_holes(path: Path) -> bool:
    with open(path / "probe", "wb") as file:
        file.write(bytes(1 << 16))
        file.flush()
        return punch_hole(file.fileno(), 0, 1 << 16)


@pytest.mark.parametrize("can_punch", [True, False])
@pytest.mark.parametrize("reopened", [False, True])
def test_removed_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_punch: bool, reopened: bool) -> None:
    """The space of their slots but the first is given back, if the file system can, and taken again by others."""
    if can_punch and not has_holes(tmp_path):
        pytest.skip("this file system has no holes")
    if not can_punch:
        monkeypatch.setattr(disk_segment, "punch_hole", lambda *arguments: False)
    tier, rng = make(tmp_path), random.Random(6)
    records = {key(n): rng.randbytes(rng.choice([1, 3000, 50_000, 400_000])) for n in range(40)}
    put(tier, records)
    (reader,) = tier.open([key(1)])
    before, names = on_disk(tmp_path), [key(n) for n in range(1, 40, 2)]
    assert tier.remove(names) == 20
    assert bytes(reader.piece(0, reader.num_bytes)) == records[key(1)]
    reader.close()
    removed = [len(records.pop(name)) for name in names][1:]  # the first one was being read
    num_slots = sum((HEADER_BYTES + size - 1) // SLOT_BYTES for size in removed)
    num_more = on_disk(tmp_path) - before + can_punch * num_slots * SLOT_BYTES
    assert 0 <= num_more <= 4 * SLOT_BYTES, "more than a file system needs for its own lists of holes"
    if reopened:
        tier.close()
        tier = make(tmp_path)
    tier.check()
    assert get(tier, list(records)) == list(records.values()) and tier.stats().corrupted == 0
    more = {key(n): rng.randbytes(30_000) for n in range(40, 80)}
    put(tier, more)
    assert on_disk(tmp_path) <= before + LEAST and get(tier, list(more)) == list(more.values())
    tier.clear()
    tier.check()
    assert not can_punch or on_disk(tmp_path) < before / 10 + LEAST


def test_a_hole_that_the_disk_does_not_fill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A miss, and counted; nothing is lost, and the hole serves when there is space again."""
    if not has_holes(tmp_path):
        pytest.skip("this file system has no holes")
    tier, data = make(tmp_path, retry_seconds=0), bytes(200_000)
    put(tier, {key(n): data for n in range(3)})
    tier.remove([key(1)])
    with faulty(monkeypatch, lambda name, _: name == "posix_fallocate", errno.ENOSPC):
        with pytest.raises(TierError, match="No space left on device"):
            tier.create(key(3), len(data))
        tier.check()
    assert get(tier, [key(0), key(2)]) == [data, data] and tier.stats().errors == 1
    before = tier._allocator.directories[0].num_bytes
    assert put(tier, {key(3): data}) == [True] and tier._allocator.directories[0].num_bytes == before
    tier.check()


def test_a_directory_of_whole_segments(tmp_path: Path) -> None:
    """As earlier versions made them: they are used as they are, and keep their length."""
    make(tmp_path).close()
    num_slots = SEGMENT_BYTES // SLOT_BYTES
    for n in range(2):
        Segment.create(tmp_path / f"{n:04}.segment", SLOT_BYTES, num_slots, num_slots).close()
    tier, data = make(tmp_path), bytes(3 << 20)
    for n in range(4):
        assert put(tier, {key(n): data}) == [True]
    assert [file.stat().st_size for file in sorted(tmp_path.glob("*.segment"))] == [SEGMENT_BYTES] * 2
    assert put(tier, {key(4): data}) == [True]
    assert (tmp_path / "0002.segment").stat().st_size <= len(data) + LEAST
    assert get(tier, [key(n) for n in range(5)]) == [data] * 5 and tier.stats().corrupted == 0
    tier.check()

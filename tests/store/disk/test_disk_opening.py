"""Opening a disk tier: what is found, and in which order; other sizes, versions, copies, damage and clocks."""

import os
import shutil
import time
from pathlib import Path

import pytest
import xxhash
from support.disk_folders import SEGMENT_BYTES, make
from support.store_records import get, key, put, record

from kvpage.store.disk import allocator as disk_allocator
from kvpage.store.disk import segment as disk_segment
from kvpage.store.disk.disk_tier import SLOT_BYTES, DiskTier
from kvpage.store.disk.segment import Segment


def test_opened_as_it_is(tmp_path: Path) -> None:
    """Without a capacity nothing is made or deleted, and what is there is used."""
    tier = make(tmp_path / "t", 3 * SEGMENT_BYTES)
    for n in range(6):
        put(tier, {key(n): record(key(n), 14 * SLOT_BYTES)})
    tier.close()
    (tmp_path / "t" / "0007.segment").write_bytes(b"damaged")
    files = {file.name: file.stat().st_size for file in (tmp_path / "t").iterdir()}
    tier = DiskTier([tmp_path / "t"], None)
    assert all(tier.contains([key(n) for n in range(6)]))
    stats = tier.stats()
    assert (stats.capacity, stats.corrupted) == (3 * SEGMENT_BYTES, 1)
    assert put(tier, {key(9): record(key(9), 14 * SLOT_BYTES)}) == [True] and tier.stats().evicted == 1
    tier.check()
    tier.close()
    assert {file.name: file.stat().st_size for file in (tmp_path / "t").iterdir()} == files
    with pytest.raises(FileNotFoundError):
        DiskTier([tmp_path / "nowhere"], None)
    assert not (tmp_path / "nowhere").exists()


def test_a_smaller_capacity_keeps_what_was_written_last(tmp_path: Path) -> None:
    tier = make(tmp_path, 3 * SEGMENT_BYTES)
    for n in range(3):
        put(tier, {key(n): record(key(n), 25 * SLOT_BYTES)})
    tier.remove([key(0)])
    put(tier, {key(0): record(key(0), 25 * SLOT_BYTES)})  # into the first segment again
    tier.close()
    tier = make(tmp_path, 2 * SEGMENT_BYTES)
    assert tier.contains([key(n) for n in range(3)]) == [True, False, True]
    tier.check()


def test_segments_of_another_version_are_left_alone(tmp_path: Path) -> None:
    tier = make(tmp_path)
    put(tier, {key(0): record(key(0))})
    tier.close()
    (file,) = tmp_path.glob("*.segment")
    data = bytearray(file.read_bytes())
    data[8] = 2
    head = bytes(data[: disk_segment.SEGMENT.size - 8])
    data[len(head) : len(head) + 8] = xxhash.xxh3_64_digest(head)
    file.write_bytes(data)
    for _ in range(2):  # the lock is not kept
        with pytest.raises(ValueError, match="segments must be of version 1, .*0000.segment is of version 2"):
            make(tmp_path)
    assert file.read_bytes() == data


def test_a_copy_of_a_segment_counts_once(tmp_path: Path) -> None:
    tier = make(tmp_path)
    put(tier, {key(n): record(key(n), 9000) for n in range(3)})
    tier.close()
    shutil.copy(tmp_path / "0000.segment", tmp_path / "0001.segment")
    tier = make(tmp_path)
    assert tier.stats().num_records == 3 and tier.stats().corrupted == 1
    assert get(tier, [key(n) for n in range(3)]) == [record(key(n), 9000) for n in range(3)]
    assert [file.name for file in tmp_path.glob("*.segment")] == ["0000.segment"]
    tier.check()


def test_a_damaged_header_is_mended_once(tmp_path: Path) -> None:
    tier = make(tmp_path)
    put(tier, {key(n): record(key(n), 9000) for n in range(3)})
    tier.close()
    with open(tmp_path / "0000.segment", "r+b") as file:
        file.seek(4 * SLOT_BYTES + 50)
        (before,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([before ^ 1]))
    for num_damaged in (1, 0):
        tier = make(tmp_path)
        assert tier.stats().corrupted == num_damaged
        assert tier.contains([key(n) for n in range(3)]) == [True, False, True]
        tier.check()
        tier.close()


def test_ages_survive_as_the_time_of_writing(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    tier = make(tmp_path)
    put(tier, {key(0): record(key(0)), key(1): record(key(1))})
    monkeypatch.setattr(time, "time", lambda: 2000.0)
    get(tier, [key(0)])
    assert {info.key: info.last_used for info in tier.infos()} == {key(0): 2000.0, key(1): 1000.0}
    tier.close()
    tier = make(tmp_path)
    assert {info.last_used for info in tier.infos()} == {1000.0}


def test_after_opening_the_oldest_written_goes_first(tmp_path: Path) -> None:
    tier = make(tmp_path, SEGMENT_BYTES)
    for n in range(4):
        put(tier, {key(n): record(key(n), 6 * SLOT_BYTES)})
    tier.remove([key(0)])
    put(tier, {key(4): record(key(4), 6 * SLOT_BYTES)})  # the last that was written is the first of the file
    tier.close()
    tier = make(tmp_path, SEGMENT_BYTES)
    for n in (5, 6):
        put(tier, {key(n): record(key(n), 6 * SLOT_BYTES)})
    assert tier.contains([key(n) for n in range(7)]) == [False, False, False, True, True, True, True]


def test_opening_reads_headers_only(tmp_path: Path, monkeypatch) -> None:
    tier = DiskTier([tmp_path], 64 << 20, segment_bytes=32 << 20)
    for n in range(6):
        put(tier, {key(n): record(key(n), 4 << 20)})
    tier.close()
    calls = []
    monkeypatch.setattr(
        Segment, "run_at", lambda self, slot, real=Segment.run_at: calls.append(slot) or real(self, slot)
    )
    assert DiskTier([tmp_path], 64 << 20, segment_bytes=32 << 20).stats().num_records == 6
    assert len(calls) <= 12, "free space was walked slot by slot"


def test_directories_that_come_back_bring_nothing_older(tmp_path: Path) -> None:
    """What was written while they were left out counts, whatever each directory had counted up to."""
    old, new = tmp_path / "old", tmp_path / "new"
    tier = make(old)
    for seed in range(5):
        put(tier, {key(n): record(key(n), seed=seed) for n in range(3)})
    tier.close()
    tier = make(new)
    put(tier, {key(n): record(key(n), seed=9) for n in range(2)})
    tier.close()
    tier = DiskTier([old, new], 8 * SEGMENT_BYTES, segment_bytes=SEGMENT_BYTES)
    assert get(tier, [key(n) for n in range(3)]) == [record(key(n), seed=9 if n < 2 else 4) for n in range(3)]
    tier.check()


def test_foreign_segments_are_not_mistaken_for_ours(tmp_path: Path) -> None:
    first, second = make(tmp_path / "a", SEGMENT_BYTES), make(tmp_path / "b", SEGMENT_BYTES)
    put(first, {key(0): record(key(0), 9000)})
    put(second, {key(1): record(key(1), 9000)})
    first.close(), second.close()
    a, b = (next((tmp_path / name).glob("*.segment")) for name in "ab")
    mixed = a.read_bytes()[:SLOT_BYTES] + b.read_bytes()[SLOT_BYTES:]  # a's id before b's runs
    a.write_bytes(mixed)
    tier = make(tmp_path / "a", SEGMENT_BYTES)
    assert tier.contains([key(0), key(1)]) == [False, False]
    (tmp_path / "a" / "notes.txt").write_text("mine")
    tier.close()
    make(tmp_path / "a", SEGMENT_BYTES).close()
    assert (tmp_path / "a" / "notes.txt").read_text() == "mine"


def test_of_two_records_of_a_key_the_newer_counts(tmp_path: Path, monkeypatch) -> None:
    tier = make(tmp_path, SEGMENT_BYTES)
    old, new = record(key(0), 9000, seed=1), record(key(0), 5000, seed=2)
    put(tier, {key(0): old})
    monkeypatch.setattr(disk_allocator, "mark_free", lambda entry: None)  # as if the process had died before
    put(tier, {key(0): new})
    tier.close()
    monkeypatch.undo()
    tier = make(tmp_path, SEGMENT_BYTES)
    assert get(tier, [key(0)]) == [new]
    tier.check()

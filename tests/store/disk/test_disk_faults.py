"""The disk tier when the disk fails: errors at every call, records cut off, files deleted.

What kills and losses of power leave behind: tests/reliability/battery_disk_crashes.py.
"""

import errno
import shutil
from pathlib import Path

import pytest
from support.disk_faults import SEGMENT_BYTES, fail_at, faulty, make, work
from support.store_records import get, key, put, record

from kvpage.store.disk.disk_tier import SLOT_BYTES, DiskTier
from kvpage.store.tiers.tier import TierError


@pytest.mark.parametrize(
    "error, half",
    [(errno.ENOSPC, False), (errno.ENOSPC, True), (errno.EIO, False), (errno.EMFILE, False), (None, False)],
)
@pytest.mark.parametrize("lasts", [False, True])
def test_errors_at_every_call(tmp_path: Path, error: int | None, lasts: bool, half: bool) -> None:
    """One that fails (half: half written), or it and all after it: nothing wrong comes out, nothing is lost, and all
    goes on afterwards. Without an error: reads and writes that are short.
    """
    for nth in range(1, 400):
        path = tmp_path / str(nth)
        if not fail_at(path, nth, error, half, lasts, work):
            return
        shutil.rmtree(path)
    raise AssertionError("not every call was tried")


def test_a_failing_drive_leaves_the_others(tmp_path: Path, monkeypatch) -> None:
    """Records go to the drive that works; those of the other are misses until it is back."""
    tier = make(tmp_path / "a", tmp_path / "b")
    records = {key(n): record(key(n), 9000) for n in range(8)}
    for name, data in records.items():
        put(tier, {name: data})
    fds = {directory.spaces[0].segment._fd for directory in tier._allocator.directories[:1]}
    with faulty(monkeypatch, lambda name, arguments: name != "fstat" and arguments[0] in fds, errno.EIO):
        found = get(tier, list(records))
        assert 0 < sum(data is not None for data in found) < 8
        assert all(data in (None, want) for data, want in zip(found, records.values(), strict=True))
        more = {key(n): record(key(n), 9000) for n in range(8, 14)}
        for name, data in more.items():
            assert put(tier, {name: data}) == [True]
        assert get(tier, list(more)) == list(more.values())
    assert tier.stats().errors > 0
    assert get(tier, list(records)) == list(records.values())
    tier.check()


def test_what_cannot_be_removed_is_not_forgotten(tmp_path: Path, monkeypatch) -> None:
    """Unfindable at once; its slots wait until the disk takes the header; flush(sync=True) tells."""
    tier = make(tmp_path)
    put(tier, {key(0): record(key(0), 9000), key(1): record(key(1), 9000)})
    with faulty(monkeypatch, lambda name, arguments: name == "pwrite", errno.EIO):
        assert tier.remove([key(0)]) == 1
        assert tier.contains([key(0), key(1)]) == [False, True]
        with pytest.raises(TierError, match="1 records could not be removed"):
            tier.flush(sync=True)
        with pytest.raises(TierError, match=f"{tmp_path}: Input/output error"):
            tier.create(key(2), 100)
        tier.check()
    tier.flush(sync=True)
    tier.check()
    tier.close()
    assert make(tmp_path).contains([key(0), key(1)]) == [False, True]


def test_a_commit_that_fails_can_be_repeated_or_given_up(tmp_path: Path, monkeypatch) -> None:
    tier = make(tmp_path)
    data = record(key(0), 9000)
    put(tier, {key(0): record(key(0), 9000, seed=1)})
    for is_repeated in (False, True):
        writer = tier.create(key(0), len(data))
        writer.piece(0, len(data))[:] = data
        with faulty(monkeypatch, lambda name, arguments: name == "pwrite", errno.EIO), pytest.raises(TierError):
            tier.commit([writer])
        assert get(tier, [key(0)]) == [record(key(0), 9000, seed=1)], "the former record is gone"
        if is_repeated:
            assert tier.commit([writer]) == [True]
        writer.close()
        tier.flush()
        tier.check()
    assert get(tier, [key(0)]) == [data]


def test_of_several_commits_those_that_fail_are_told(tmp_path: Path, monkeypatch) -> None:
    tier = make(tmp_path)
    writers = []
    for n in range(3):
        data = record(key(n), 9000)
        writers.append(tier.create(key(n), len(data)))
        writers[-1].piece(0, len(data))[:] = data
    where = {writers[1].entry.run.slot * SLOT_BYTES}
    with faulty(monkeypatch, lambda name, arguments: name == "pwrite" and arguments[2] in where, errno.EIO):
        assert tier.commit(writers) == [True, False, True]
    assert get(tier, [key(n) for n in range(3)]) == [record(key(0), 9000), None, record(key(2), 9000)]
    writers[1].close()
    tier.flush()
    tier.check()


def test_no_space_for_another_segment(tmp_path: Path, monkeypatch) -> None:
    """What is there has to do: records are evicted instead. With nothing there, there is no room."""
    tier = make(tmp_path, capacity=4 * SEGMENT_BYTES)
    with faulty(monkeypatch, lambda name, arguments: name == "posix_fallocate", errno.ENOSPC):
        assert tier.create(key(0), 100) is None
    assert list(tmp_path.glob("*.segment")) == [], "a segment without space is left behind"
    put(tier, {key(0): record(key(0), 20 * SLOT_BYTES)})
    with faulty(monkeypatch, lambda name, arguments: name == "posix_fallocate", errno.ENOSPC):
        put(tier, {key(1): record(key(1), 20 * SLOT_BYTES)})
    assert tier.contains([key(0), key(1)]) == [False, True]
    put(tier, {key(2): record(key(2), 20 * SLOT_BYTES)})
    assert tier.contains([key(1), key(2)]) == [True, True]
    tier.check()


def test_cut_off_or_overwritten_while_open(tmp_path: Path) -> None:
    """Somebody else writes to the file: misses, which are forgotten so that they can be stored again."""
    tier = make(tmp_path)
    records = {key(n): record(key(n), 3 * SLOT_BYTES) for n in range(4)}
    put(tier, records)
    readers = tier.open(list(records))
    slots = [reader._entry.run.slot for reader in readers]
    (file,) = tmp_path.glob("*.segment")
    with open(file, "r+b") as other:
        other.truncate((slots[2] + 1) * SLOT_BYTES)  # in the middle of record 2
        other.seek(slots[0] * SLOT_BYTES)
        head = other.read(SLOT_BYTES)
        other.seek(slots[1] * SLOT_BYTES)
        other.write(head)  # record 0 in the place of record 1
    assert get(tier, [key(0), key(1)]) == [records[key(0)], None]
    with pytest.raises(TierError, match="ends too early"):
        readers[2].piece(0, readers[2].num_bytes)
    assert get(tier, [key(3)]) == [None]
    assert tier.contains(list(records)) == [True, False, False, False]
    assert tier.stats().corrupted == 3
    for reader in readers:
        reader.close()
    put(tier, records)
    assert get(tier, list(records)) == list(records.values())


@pytest.mark.parametrize("what", ["directory", "segment"])
def test_deleted_while_open(tmp_path: Path, what: str) -> None:
    """What was open can be read; what is stored from then on is in files that have names, and found by the next."""
    path = tmp_path / "tier"
    tier = make(path, capacity=SEGMENT_BYTES)
    put(tier, {key(n): record(key(n), 9000) for n in range(3)})
    (reader,) = tier.open([key(0)])
    writer = tier.create(key(4), 100)
    writer.piece(0, 100)
    if what == "directory":
        shutil.rmtree(path)
    else:
        (path / "0000.segment").unlink()
    assert put(tier, {key(5): record(key(5), 9000)}) == [True]
    assert tier.contains([key(n) for n in (0, 1, 5)]) == [False, False, True]
    reader.close()
    tier.check()
    with pytest.raises(ValueError, match="must be open once"):
        make(path, capacity=SEGMENT_BYTES)
    assert path.stat().st_mode & 0o777 == 0o700
    with pytest.raises(TierError):
        tier.commit([writer])
    writer.close()
    assert tier.contains([key(4), key(5)]) == [False, True]
    tier.check()
    tier.flush(sync=True)
    tier.close()
    tier = make(path, capacity=SEGMENT_BYTES)
    assert get(tier, [key(0), key(5)]) == [None, record(key(5), 9000)]


@pytest.mark.parametrize("successor", ["none", "empty", "another tier's", "a link"])
def test_moved_while_open(tmp_path: Path, successor: str) -> None:
    """What is stored from then on is where others find it, and never in a directory that somebody else has."""
    path, moved = tmp_path / "tier", tmp_path / "moved"
    tier = make(path, capacity=4 * SEGMENT_BYTES)
    put(tier, {key(0): record(key(0), 9000)})
    (reader,) = tier.open([key(0)])
    path.rename(moved)
    if successor == "empty":
        path.mkdir()
    elif successor == "a link":
        path.symlink_to(tmp_path / "linked", target_is_directory=True)
        (tmp_path / "linked").mkdir()
    elif successor == "another tier's":
        other = make(path, capacity=SEGMENT_BYTES)
        put(other, {key(9): record(key(9), 9000)})
        files = {file: file.read_bytes() for file in path.iterdir()}
        assert tier.create(key(1), 9000) is None and tier.stats().errors > 0
        assert {file: file.read_bytes() for file in path.iterdir()} == files
        assert get(other, [key(9)]) == [record(key(9), 9000)]
        other.close()
    for number in range(1, 14):
        assert put(tier, {key(number): record(key(number), 9000)}) == [True]
    with pytest.raises(TierError), reader:
        reader.piece(0, 1)
    tier.check()
    with pytest.raises(ValueError, match="must be open once"):
        make(path)
    old = make(moved)
    assert get(old, [key(0), key(1)]) == [record(key(0), 9000), None]
    old.close()
    assert tier.contains([key(0)]) == [False]
    tier.close()
    again = make(path, capacity=4 * SEGMENT_BYTES)
    assert get(again, [key(number) for number in range(1, 14)]) == [record(key(n), 9000) for n in range(1, 14)]


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_segment_that_was_moved(tmp_path: Path, is_replaced: bool) -> None:
    """It is not written to any more; a file that is in its place is left alone until the tier is opened again."""
    tier = make(tmp_path / "a", capacity=SEGMENT_BYTES)
    put(tier, {key(0): record(key(0), 9000)})
    first, moved = tmp_path / "a" / "0000.segment", tmp_path / "0000.segment"
    first.rename(moved)
    before = moved.read_bytes()
    if is_replaced:
        first.write_bytes(b"somebody else's")
    for number in range(1, 4):
        assert put(tier, {key(number): record(key(number), 9000)}) == [True]
    assert tier.contains([key(n) for n in range(4)]) == [False, True, True, True]
    assert moved.read_bytes() == before
    assert not is_replaced or first.read_bytes() == b"somebody else's"
    tier.check()
    tier.close()
    tier = make(tmp_path / "a", capacity=SEGMENT_BYTES)
    assert get(tier, [key(n) for n in range(4)]) == [None] + [record(key(n), 9000) for n in range(1, 4)]


def test_a_lock_that_was_deleted(tmp_path: Path) -> None:
    """The records are there still, and of two of one key the newer counts."""
    tier = make(tmp_path / "a", tmp_path / "b")
    put(tier, {key(n): record(key(n), 9000, seed=1) for n in range(2)})
    put(tier, {key(n): record(key(n), 9000, seed=2) for n in (1, 0)})
    for name in "ab":
        (tmp_path / name / "lock").unlink()
        put(tier, {key(5): record(key(5))})
        assert get(tier, [key(0), key(1)]) == [record(key(n), 9000, seed=2) for n in range(2)]
        tier.check()
    with pytest.raises(ValueError, match="must be open once"):
        make(tmp_path / "a")


def test_a_full_disk_is_not_asked_again_at_once(tmp_path: Path, monkeypatch) -> None:
    tier = DiskTier([tmp_path], 4 * SEGMENT_BYTES, segment_bytes=SEGMENT_BYTES, retry_seconds=3600)
    asked = []
    with faulty(
        monkeypatch, lambda name, arguments: name == "posix_fallocate" and not asked.append(name), errno.ENOSPC
    ):
        for _ in range(3):
            assert tier.create(key(0), 100) is None
    assert len(asked) == 1

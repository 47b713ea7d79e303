"""The disk tier against a dict over many openings; what a crash, a fault or a stranger leaves is a miss or exact."""

import errno
import hashlib
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import xxhash
from store_records import get, key, put, record

from kvpage.store import disk_room, disk_segment
from kvpage.store.disk import SLOT_BYTES, DiskTier
from kvpage.store.disk_segment import Segment
from kvpage.store.tier import TierError

SEGMENT_BYTES = 32 * SLOT_BYTES


def make(path: Path, capacity: int = 4 * SEGMENT_BYTES, **fields) -> DiskTier:
    return DiskTier([path], capacity, segment_bytes=SEGMENT_BYTES, **fields)


def is_right(name: bytes, data: bytes | None) -> bool:
    """As every reader of records checks it: the key in the header, and the checksum."""
    return data is not None and data[16:48] == name and xxhash.xxh3_128_digest(data[:-16]) == data[-16:]


@pytest.mark.parametrize("num_paths", [1, 3])
@pytest.mark.parametrize("policy", ["lru", "lfu", "fifo"])
@pytest.mark.parametrize("seed", range(2))
def test_against_a_dict_over_many_openings(tmp_path: Path, seed: int, policy: str, num_paths: int) -> None:
    rng = random.Random(seed)
    paths = [tmp_path / str(n) for n in range(num_paths)]
    open_tier = lambda: DiskTier(paths, 6 * SEGMENT_BYTES, policy, SEGMENT_BYTES)  # noqa: E731
    tier, model, readers = open_tier(), {}, []
    for step in range(400):
        action, name = rng.random(), key(rng.randrange(20))
        if action < 0.4:
            data = record(name, 4 * rng.randint(1, 10 * SLOT_BYTES // 4), seed=step)
            writer = tier.create(name, len(data))
            if writer is None:
                continue
            with writer:
                for begin in range(0, len(data), 5000):
                    piece = data[begin : begin + 5000]
                    writer.piece(begin, begin + len(piece))[:] = piece
                if rng.random() < 0.8:
                    assert tier.commit([writer]) == [True]
                    model[name] = data
        elif action < 0.65:
            (reader,) = tier.open([name])
            if reader is not None:
                readers.append((reader, model[name]))
        elif action < 0.75:
            was_there = tier.contains([name])[0]
            assert tier.remove([name]) == int(was_there)
            model.pop(name, None)
        elif action < 0.78:
            for reader, _ in readers:
                reader.close()
            readers.clear()
            tier.close()
            tier = open_tier()
        elif readers:
            reader, data = readers.pop(rng.randrange(len(readers)))
            cut = reader.num_bytes // 3
            assert bytes(reader.piece(0, cut)) + bytes(reader.piece(cut, reader.num_bytes)) == data
            reader.close()
        present = {info.key for info in tier.infos()}
        assert present <= set(model), "a record that was removed, or never committed, is there"
        model = {name: model[name] for name in present}
        tier.check()
        stats = tier.stats()
        assert (stats.num_records, stats.num_bytes) == (len(model), sum(map(len, model.values())))
    for reader, data in readers:
        assert bytes(reader.piece(0, reader.num_bytes)) == data
    tier.close()
    tier = open_tier()
    assert get(tier, list(model)) == list(model.values())
    assert tier.stats().num_bytes <= 6 * SEGMENT_BYTES and len(model) > 3
    for path in paths:
        assert len(list(path.glob("*.segment"))) > 0, "a directory is not used"


def test_eviction_order_and_capacity(tmp_path: Path) -> None:
    tier = make(tmp_path, SEGMENT_BYTES)
    data = {key(n): record(key(n), 7 * SLOT_BYTES) for n in range(8)}
    for name in list(data)[:3]:
        assert put(tier, {name: data[name]}) == [True]
    assert get(tier, [key(0)]) == [data[key(0)]]
    put(tier, {key(3): data[key(3)]})
    assert tier.contains([key(n) for n in range(4)]) == [True, False, True, True]
    (reader,) = tier.open([key(2)])
    for n in range(4, 8):
        put(tier, {key(n): data[key(n)]})
    assert bytes(reader.piece(0, reader.num_bytes)) == data[key(2)] and tier.contains([key(2)]) == [True]
    reader.close()
    assert tier.create(key(9), SEGMENT_BYTES) is None
    assert tier.stats().evicted >= 4
    size = sum(file.stat().st_size for file in tmp_path.glob("*.segment"))
    assert size <= SEGMENT_BYTES


def test_modes_locks_and_space(tmp_path: Path) -> None:
    path = tmp_path / "new" / "tier"
    tier = make(path)
    put(tier, {key(0): record(key(0))})
    assert path.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {0o600}
    with pytest.raises(ValueError, match="must be open once, another tier or process has it"):
        make(path)
    code = "import sys; from kvpage.store.disk import DiskTier; DiskTier([sys.argv[1]], 1 << 20)"
    run = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, cwd="/")
    assert run.returncode == 1 and "must be open once" in run.stderr
    tier.close()
    tier.close()
    assert make(path).contains([key(0)]) == [True]
    for arguments, message in (
        (([], 1 << 20), "paths must be at least one"),
        (([tmp_path, tmp_path], 1 << 20), "each once"),
        (([tmp_path / "x"], 1000), "capacity and segment_bytes must be at least"),
        (([tmp_path / "y"], 1 << 60), "capacity must fit on the disk"),
    ):
        with pytest.raises(ValueError, match=message):
            DiskTier(*arguments)
    with pytest.raises(TierError, match="is closed"):
        tier.contains([key(0)])


def test_writers_write_in_order_and_to_the_end(tmp_path: Path) -> None:
    tier = make(tmp_path)
    writer = tier.create(key(0), 100)
    writer.piece(0, 50)
    for begin, end in ((0, 50), (60, 70), (50, 101)):
        with pytest.raises(ValueError, match="a piece must begin at 50"):
            writer.piece(begin, end)
    with pytest.raises(ValueError, match="must be written to its end"):
        tier.commit([writer])
    writer.close()
    with pytest.raises(ValueError, match="not closed"):
        tier.commit([writer])
    put(tier, {key(0): record(key(0))})
    (reader,) = tier.open([key(0)])
    with pytest.raises(ValueError, match="a piece must lie in"):
        reader.piece(0, reader.num_bytes + 1)


def test_every_corrupted_byte_is_a_miss_or_exact(tmp_path: Path) -> None:
    """Flips each byte of the headers, and many others, between two openings; swaps, duplicates and truncates slots."""
    names = [key(n) for n in range(4)]
    records = {name: record(name, 4000 + 3000 * n) for n, name in enumerate(names)}
    tier = make(tmp_path, SEGMENT_BYTES)
    put(tier, records)
    tier.remove([names[1]])
    tier.close()
    (file,) = tmp_path.glob("*.segment")
    whole, rng = file.read_bytes(), random.Random(0)
    positions = [slot * SLOT_BYTES + at for slot in range(9) for at in range(0, 112, 3)]
    damaged = []
    for at in positions + [rng.randrange(9 * SLOT_BYTES) for _ in range(150)]:
        damaged.append(whole[:at] + bytes([whole[at] ^ (1 << rng.randrange(8))]) + whole[at + 1 :])
    slots = [whole[at : at + SLOT_BYTES] for at in range(0, len(whole), SLOT_BYTES)]
    for _ in range(40):
        mixed = list(slots)
        a, b = rng.randrange(1, 9), rng.randrange(1, 9)
        mixed[a], mixed[b] = mixed[b], mixed[rng.choice([a, b])]
        damaged.append(b"".join(mixed))
    damaged += [whole[:length] for length in (0, 10, SLOT_BYTES, 5 * SLOT_BYTES)] + [os.urandom(len(whole))]
    num_right = 0
    for data in damaged:
        file.write_bytes(data)
        tier = make(tmp_path, SEGMENT_BYTES)
        for name, found in zip(names, get(tier, names), strict=True):
            if is_right(name, found):
                assert found == records[name]
                num_right += 1
        tier.check()
        assert put(tier, {key(9): record(key(9))}) == [True]
        tier.close()
        for other in tmp_path.glob("*.segment"):
            if other != file:
                other.unlink()
    assert num_right > len(damaged)


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
    monkeypatch.setattr(disk_room, "mark_free", lambda entry: None)  # as if the process had died before
    put(tier, {key(0): new})
    tier.close()
    monkeypatch.undo()
    tier = make(tmp_path, SEGMENT_BYTES)
    assert get(tier, [key(0)]) == [new]
    tier.check()


def test_a_smaller_capacity_deletes_segments(tmp_path: Path) -> None:
    tier = make(tmp_path, 4 * SEGMENT_BYTES)
    for n in range(12):
        put(tier, {key(n): record(key(n), 9 * SLOT_BYTES)})
    tier.close()
    tier = make(tmp_path, 2 * SEGMENT_BYTES)
    assert len(list(tmp_path.glob("*.segment"))) == 2 and 0 < tier.stats().num_records < 12
    tier.check()


class FailingOS:
    """os, whose n-th call of those that touch the disk fails, or is short."""

    def __init__(self, n: int, error: int | None) -> None:
        self.left, self.error = n, error

    def __getattr__(self, name: str):
        real = getattr(os, name)
        if name not in ("pwrite", "preadv", "pread", "posix_fallocate", "open", "fsync"):
            return real

        def call(*args, **kwargs):
            self.left -= 1
            if self.left != 0:
                return real(*args, **kwargs)
            if self.error is not None:
                raise OSError(self.error, os.strerror(self.error))
            if name == "pwrite":
                return real(args[0], bytes(args[1])[: max(len(args[1]) // 2, 1)], *args[2:])
            return real(*args, **kwargs)

        return call


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EMFILE, errno.EROFS, None])
def test_faults_at_every_call_lose_nothing_else_and_pass(tmp_path: Path, error: int | None, monkeypatch) -> None:
    records = {key(n): record(key(n), 6000 + 2000 * n) for n in range(6)}
    for n in range(1, 60):
        path = tmp_path / f"{error}-{n}"
        tier = make(path, 2 * SEGMENT_BYTES)
        put(tier, {key(9): record(key(9))})
        failing = FailingOS(n, error)
        monkeypatch.setattr(disk_segment, "os", failing)
        committed = {}
        for name, data in records.items():
            try:
                if put(tier, {name: data}) == [True]:
                    committed[name] = data
            except (TierError, AssertionError) as raised:  # the helper asserts that there is a writer
                assert isinstance(raised, TierError) or error is not None
        for name in [*records, key(9)]:
            try:
                (found,) = get(tier, [name])
            except TierError:
                continue
            if is_right(name, found):
                assert found == {**records, key(9): record(key(9))}[name]
        is_over = failing.left > 0
        monkeypatch.setattr(disk_segment, "os", os)
        tier.check()
        assert get(tier, list(committed)) == list(committed.values())
        assert put(tier, {key(5): records[key(5)]}) == [True], "it did not recover"
        tier.close()
        tier = make(path, 2 * SEGMENT_BYTES)
        for name, found in zip(committed, get(tier, list(committed)), strict=True):
            assert found is None or found == committed[name]
        assert get(tier, [key(5)]) == [records[key(5)]]
        tier.check()
        tier.close()
        if is_over:
            break
    assert is_over


CHILD = """
import sys, hashlib
sys.path.insert(0, sys.argv[2])
from store_records import key, put, record
from kvpage.store.disk import DiskTier
tier = DiskTier([sys.argv[1]], 1 << 20, segment_bytes=1 << 19)
n = int(sys.argv[3])
print("ready", flush=True)
while True:
    name = key(n % 40)
    put(tier, {name: record(name, 3000 + 700 * (n % 40))})
    n += 1
"""


def test_killed_while_writing(tmp_path: Path) -> None:
    """A record is its key's, whole, or not there; what was committed before the process was killed is there."""
    num_found = 0
    for attempt in range(12):
        arguments = [sys.executable, "-c", CHILD, str(tmp_path / "t"), str(Path(__file__).parents[1]), str(attempt * 7)]
        child = subprocess.Popen(arguments, stdout=subprocess.PIPE, cwd="/")
        assert child.stdout.readline() == b"ready\n"
        try:
            child.wait(random.Random(attempt).uniform(0.005, 0.05))
        except subprocess.TimeoutExpired:
            child.kill()
        child.wait()
        tier = DiskTier([tmp_path / "t"], 1 << 20, segment_bytes=1 << 19)
        names = [key(n) for n in range(40)]
        for n, found in enumerate(get(tier, names)):
            if found is not None:
                assert found == record(names[n], 3000 + 700 * n)
                num_found += 1
        tier.check()
        tier.close()
    assert num_found > 40


def test_opening_reads_headers_only(tmp_path: Path, monkeypatch) -> None:
    tier = DiskTier([tmp_path], 64 << 20, segment_bytes=32 << 20)
    for n in range(6):
        put(tier, {key(n): record(key(n), 4 << 20)})
    tier.close()
    calls = []
    monkeypatch.setattr(
        Segment, "_run_at", lambda self, slot, real=Segment._run_at: calls.append(slot) or real(self, slot)
    )
    assert DiskTier([tmp_path], 64 << 20, segment_bytes=32 << 20).stats().num_records == 6
    assert len(calls) <= 12, "free space was walked slot by slot"


def test_keys_are_hashes() -> None:
    assert key(0) == hashlib.sha256(b"0").digest()

"""The disk tier against a dict over many openings; what a crash, a fault or a stranger leaves is a miss or exact."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest
from support.disk_folders import SEGMENT_BYTES, is_right, make
from support.seeds import seed_of
from support.store_records import get, key, put, record, write
from support.tier_life import TierLife

from kvpage.store.disk import reader_writer
from kvpage.store.disk import segment as disk_segment
from kvpage.store.disk.disk_tier import SLOT_BYTES, DiskTier
from kvpage.store.disk.reader_writer import CUT_BYTES, WRITE_BYTES, Buffers
from kvpage.store.tiers.policy import POLICIES
from kvpage.store.tiers.tier import TierError


@pytest.mark.parametrize("num_paths", [1, 3])
@pytest.mark.parametrize("policy", POLICIES)
def test_random_life_over_many_openings(tmp_path: Path, policy: str, num_paths: int) -> None:
    paths = [tmp_path / str(n) for n in range(num_paths)]
    open_tier = lambda: DiskTier(paths, 4 * SEGMENT_BYTES, policy, SEGMENT_BYTES)  # noqa: E731
    life = TierLife(seed_of(num_paths), open_tier, 10 * SLOT_BYTES, may_reopen=True)
    life.live(400)
    assert min(life.figures[name] for name in ("read", "evicted", "reopened")) > 0
    assert life.tier.stats().num_bytes <= 4 * SEGMENT_BYTES and len(life.known) > 3
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
    with pytest.raises(ValueError, match=f"must be open once, another tier of this process, {os.getpid()}, has it"):
        make(path)
    code = "import sys; from kvpage.store.disk.disk_tier import DiskTier; DiskTier([sys.argv[1]], 1 << 20)"
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
    with pytest.raises(ValueError, match="a piece must be in"):
        reader.piece(0, reader.num_bytes + 1)


def test_writes_of_many_pieces_end_at_cuts_of_the_file(tmp_path: Path, monkeypatch) -> None:
    tier, ends, rng = DiskTier([tmp_path], 16 << 20), [], random.Random(seed_of(7))
    put(tier, {key(0): rng.randbytes(5000)})
    whole = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: (ends.append(at + len(data)), whole(fd, data, at))[1])
    for number, size in enumerate((CUT_BYTES, 3 * WRITE_BYTES + 77), 1):
        data, cuts = rng.randbytes(size), [0]
        while cuts[-1] < size:
            cuts.append(min(cuts[-1] + rng.randrange(1, 300_000), size))
        writer = tier.create(key(number), size)
        ends.clear()
        write(writer, data, cuts)
        filled = list(ends)
        assert tier.commit([writer]) == [True] and get(tier, [key(number)]) == [data]
        assert all(end % CUT_BYTES == 0 for end in filled) and bool(filled) == (size > WRITE_BYTES)
    tier.close()


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


@pytest.mark.parametrize("piece_bytes", [1, 127, SLOT_BYTES, 3 * SLOT_BYTES - 128, 5 * SLOT_BYTES])
def test_every_byte_of_records_around_the_size_of_slots(tmp_path: Path, piece_bytes: int) -> None:
    """In a buffer of two slots, so that pieces meet its end everywhere; slots of others stay as they are."""
    tier = make(tmp_path)
    tier.buffers = Buffers(2 * SLOT_BYTES)
    sizes = [1, 2, *(n * SLOT_BYTES - 128 + d for n in (1, 2, 3) for d in (-1, 0, 1))]
    sizes = sizes if piece_bytes > 100 else sizes[:5]
    blobs = {key(n): random.Random(n).randbytes(size) for n, size in enumerate(sizes)}
    writers = []
    for name, data in blobs.items():
        writers.append(tier.create(name, len(data)))
        for begin in range(0, len(data), piece_bytes):
            writers[-1].piece(begin, min(begin + piece_bytes, len(data)))[:] = data[begin : begin + piece_bytes]
    assert tier.commit(writers) == [True] * len(writers)
    assert get(tier, list(blobs)) == list(blobs.values())
    for name, data in blobs.items():
        with tier.open([name])[0] as reader:
            for begin in range(0, len(data), piece_bytes):
                assert reader.piece(begin, min(begin + piece_bytes, len(data))) == data[begin : begin + piece_bytes]
            assert bytes(reader.piece(len(data), len(data))) == b""
    assert sum(writer.entry.run.num_slots for writer in writers) == sum(
        -(-(128 + size) // SLOT_BYTES) for size in sizes
    )
    tier.check()


def test_a_reader_without_memory_for_a_longer_buffer_gives_its_own_back_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given twice, one buffer had two readers at once."""
    tier, data = make(tmp_path), random.Random(1).randbytes(3 * SLOT_BYTES)
    tier.buffers = Buffers(2 * SLOT_BYTES)
    assert put(tier, {key(0): data}) == [True]
    with tier.open([key(0)])[0] as reader, monkeypatch.context() as patch:
        reader.piece(0, 1)
        patch.setattr(reader_writer, "new_buffer", Mock(side_effect=TierError("no memory")))
        with pytest.raises(TierError, match="no memory"):
            reader.piece(0, len(data))
    assert tier.buffers.take() is not tier.buffers.take()
    tier.check()


def test_a_large_record_evicts_neighbours_and_no_more(tmp_path: Path) -> None:
    """The least recently used goes, and what lies beside it as far as necessary; nothing goes if that is not enough."""
    tier = make(tmp_path, SEGMENT_BYTES)
    for n in range(30):
        put(tier, {key(n): record(key(n), 100)})
    get(tier, [key(n) for n in range(30) if n != 20])  # 20 was not used for longest
    (reader,) = tier.open([key(18)])
    put(tier, {key(50): record(key(50), 6 * SLOT_BYTES)})  # seven slots: 19, which is older than 21, and on to 25
    there = tier.contains([key(n) for n in range(30)])
    assert [n for n in range(30) if not there[n]] == [19, 20, 21, 22, 23, 24, 25] and tier.stats().evicted == 7
    assert tier.create(key(51), 25 * SLOT_BYTES) is None, "there is no such run without what is being read"
    assert sum(tier.contains([key(n) for n in range(30)])) == 23
    reader.close()
    assert put(tier, {key(51): record(key(51), 25 * SLOT_BYTES)}) == [True]
    tier.check()


def test_readers_and_writers_of_a_closed_tier(tmp_path: Path) -> None:
    tier = make(tmp_path)
    put(tier, {key(0): record(key(0), 9000)})
    (reader,) = tier.open([key(0)])
    writer = tier.create(key(1), 3 << 20) or tier.create(key(1), 9000)
    writer.piece(0, 9000)
    tier.close()
    other = make(tmp_path)  # the directory is free at once
    for call in (
        lambda: reader.piece(0, 10), lambda: tier.commit([writer]), lambda: tier.open([key(0)]),
        lambda: tier.remove([]), lambda: tier.create(key(2), 1), tier.infos, tier.clear, tier.flush, tier.stats,
    ):  # fmt: skip
        with pytest.raises(TierError, match="is closed"):
            call()
    reader.close(), reader.close(), writer.close(), writer.close()
    with pytest.raises(ValueError, match="must not be closed"):
        reader.piece(0, 10)
    with pytest.raises(ValueError, match="must not be closed"):
        writer.piece(0, 10)
    assert get(other, [key(0), key(1)]) == [record(key(0), 9000), None]
    other.check()


class Gate:
    """Calls of os.<name> wait in it until it is opened."""

    def __init__(self, monkeypatch, name: str) -> None:
        self.is_reached, self.is_open = threading.Event(), threading.Event()
        self._real = getattr(os, name)
        fake = types.SimpleNamespace(**{**vars(os), name: self._call})
        monkeypatch.setattr(disk_segment, "os", fake)

    def _call(self, *arguments):
        self.is_reached.set()
        assert self.is_open.wait(60)
        return self._real(*arguments)


def in_thread(call) -> tuple[threading.Thread, list]:
    results: list = []
    thread = threading.Thread(target=lambda: results.append(call()), daemon=True)
    thread.start()
    return thread, results


def test_files_are_closed_after_the_last_call(tmp_path: Path, monkeypatch) -> None:
    """Else the descriptor could be somebody else's file by the time that it is read or written."""
    tier = make(tmp_path)
    data = record(key(0), 9000)
    put(tier, {key(0): data})
    (reader,) = tier.open([key(0)])
    gate = Gate(monkeypatch, "preadv")
    reading, results = in_thread(lambda: bytes(reader.piece(0, len(data))))
    assert gate.is_reached.wait(60)
    tier.close()
    with pytest.raises(ValueError, match="must be open once"):
        make(tmp_path)
    gate.is_open.set()
    reading.join(60)
    assert results == [data]
    make(tmp_path).close()


def test_nothing_but_headers_waits_for_the_disk(tmp_path: Path, monkeypatch) -> None:
    """While a header is written, and takes its time, records are looked up and read; a change runs into its timeout."""
    tier = make(tmp_path)
    put(tier, {key(0): record(key(0), 9000), key(1): record(key(1), 9000)})
    gate = Gate(monkeypatch, "pwrite")
    removing, removed = in_thread(lambda: tier.remove([key(1)]))
    assert gate.is_reached.wait(60)
    looking, found = in_thread(lambda: (tier.contains([key(0), key(1)]), get(tier, [key(0)]), tier.stats().num_records))
    looking.join(60)
    assert found == [([True, False], [record(key(0), 9000)], 1)]
    with pytest.raises(TierError, match="other calls took too long"):
        tier.remove([key(0)], timeout=0.01)
    gate.is_open.set()
    removing.join(60)
    assert removed == [1] and tier.contains([key(0)]) == [True]


def test_threads_that_store_read_and_remove(tmp_path: Path) -> None:
    """Whatever is read is what one of them has stored under the key."""
    tier = DiskTier([tmp_path / "a", tmp_path / "b"], 4 * SEGMENT_BYTES, segment_bytes=SEGMENT_BYTES)

    def run(seed: int) -> int:
        rng, num_read = random.Random(seed), 0
        for _ in range(150):
            name = key(rng.randrange(12))
            action = rng.random()
            if action < 0.5:
                data = record(name, 4 * rng.randint(1, 5000), seed=rng.randrange(5))
                with contextlib.suppress(AssertionError):  # no room: all in use
                    put(tier, {name: data})
            elif action < 0.9:
                (data,) = get(tier, [name])
                assert data is None or is_right(name, data)
                num_read += data is not None
            else:
                tier.remove([name])
        return num_read

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(run, range(4))) > 50
    tier.check()
    there = {info.key: get(tier, [info.key]) for info in tier.infos()}
    tier.close()
    tier = DiskTier([tmp_path / "a", tmp_path / "b"], 4 * SEGMENT_BYTES, segment_bytes=SEGMENT_BYTES)
    assert {info.key: get(tier, [info.key]) for info in tier.infos()} == there


def test_a_forked_child_has_no_part_in_it(tmp_path: Path) -> None:
    """It cannot write, and does not keep the directory locked when its parent is gone."""
    tier = make(tmp_path)
    put(tier, {key(0): record(key(0), 9000)})
    (reader,) = tier.open([key(0)])
    ours, theirs = os.pipe()
    with tier._lock, tier._changes:  # as if other threads were at it
        child = os.fork()
    if child == 0:
        try:
            calls = (lambda: tier.contains([key(0)]), lambda: tier.create(key(1), 1), lambda: reader.piece(0, 1))
            for call in calls:
                with pytest.raises(TierError, match="is closed"):
                    call()
            reader.close(), tier.close()
            os.write(theirs, b"x")
            signal.pause()
        finally:
            os._exit(1)
    os.close(theirs)
    assert os.read(ours, 1) == b"x", "the child failed"
    assert bytes(reader.piece(0, 9160)) == record(key(0), 9000)
    tier.close()
    tier = make(tmp_path)
    assert get(tier, [key(0)]) == [record(key(0), 9000)]
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_bytes_of_records_that_look_like_headers(tmp_path: Path) -> None:
    """A record made of another slot's header, at the beginning of each of its slots: none is taken for one."""
    tier = make(tmp_path)
    put(tier, {key(0): record(key(0), 9000), key(1): record(key(1), 9000)})
    segment = tier._allocator.directories[0].spaces[0].segment
    stolen = os.pread(segment._fd, 128, SLOT_BYTES)
    data = b"".join([bytes(SLOT_BYTES - 128), *[stolen.ljust(SLOT_BYTES, b"!")] * 5])
    with tier.create(key(2), len(data)) as writer:
        slot = writer.entry.run.slot
        writer.piece(0, len(data))[:] = data
        tier.commit([writer])
    tier.remove([key(0)])
    tier.close()
    with open(tmp_path / "0000.segment", "r+b") as file:
        file.seek(slot * SLOT_BYTES)
        file.write(bytes(128))  # now it is walked slot by slot
    tier = make(tmp_path)
    assert {info.key for info in tier.infos()} == {key(1)}
    assert get(tier, [key(1)]) == [record(key(1), 9000)]
    tier.check()


def test_wrong_arguments(tmp_path: Path) -> None:
    tier = make(tmp_path)
    for name, num_bytes in ((b"short", 10), (key(0), 0), (key(0), -1)):
        with pytest.raises(ValueError, match="key must be 32 bytes, num_bytes positive"):
            tier.create(name, num_bytes)
    assert tier.create(key(0), SEGMENT_BYTES - SLOT_BYTES) is None and tier.stats().errors == 0
    assert list(tmp_path.glob("*.segment")) == [], "a segment was made for what does not fit into one"
    writer = tier.create(key(0), 10)
    writer.piece(0, 10)
    with pytest.raises(ValueError, match="each given once"):
        tier.commit([writer, writer])
    assert tier.commit([writer]) == [True] and tier.remove([b"short", key(0), key(0)]) == 1
    tier.check()

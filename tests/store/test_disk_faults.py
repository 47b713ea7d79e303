"""The disk tier when the disk fails: errors at every call, records cut off, processes killed, power lost."""

import errno
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from store_records import get, is_record, key, put, record

from kvpage.store import disk_directory, disk_segment
from kvpage.store.disk import SLOT_BYTES, DiskTier
from kvpage.store.tier import TierError

SEGMENT_BYTES = 32 * SLOT_BYTES
CALLS = ("pwrite", "preadv", "pread", "posix_fallocate", "open", "fsync", "fstat")


def make(*paths: Path, capacity: int = 2 * SEGMENT_BYTES, **fields) -> DiskTier:
    return DiskTier(paths, capacity * len(paths), segment_bytes=SEGMENT_BYTES, retry_seconds=0, **fields)


def is_right(name: bytes, data: bytes | None) -> bool:
    """As every reader of records checks it: the key in the header, and the checksum."""
    return is_record(data, name)


class FaultyOS:
    """os, some of whose calls fail. fails(name, arguments): whether this one is to."""

    def __init__(self, fails: Callable[[str, tuple], bool], error: int | None, half: bool = False) -> None:
        self.fails, self.error, self.half = fails, error, half
        self.num_calls = 0

    def __getattr__(self, name: str):
        real = getattr(os, name)
        return (lambda *arguments: self._call(name, real, arguments)) if name in CALLS else real

    def _call(self, name: str, real: Callable, arguments: tuple):
        self.num_calls += 1
        if not self.fails(name, arguments):
            return real(*arguments)
        if name == "pwrite" and (self.half or self.error is None):
            done = real(arguments[0], bytes(arguments[1])[: max(len(arguments[1]) // 2, 1)], *arguments[2:])
            if self.error is None:
                return done
        elif name == "preadv" and self.error is None:
            return real(arguments[0], [arguments[1][0][: max(len(arguments[1][0]) // 2, 1)]], *arguments[2:])
        elif self.error is None:
            return real(*arguments)
        raise OSError(self.error, os.strerror(self.error))


@contextmanager
def faulty(
    monkeypatch, fails: Callable[[str, tuple], bool], error: int | None, half: bool = False
) -> Iterator[FaultyOS]:
    fake = FaultyOS(fails, error, half)
    with monkeypatch.context() as patch:
        patch.setattr(disk_segment, "os", fake)
        patch.setattr(disk_directory, "os", fake)
        yield fake


class Trial:
    """Writes, reads and removes, whatever happens, and remembers what must be there and what may be."""

    def __init__(self, tier: DiskTier) -> None:
        self.tier = tier
        self.committed: dict[bytes, bytes] = {}

    def put(self, n: int, num_bytes: int) -> None:
        name, data = key(n), record(key(n), num_bytes, seed=num_bytes)
        try:
            writer = self.tier.create(name, len(data))
            if writer is None:
                return
            with writer:
                for begin in range(0, len(data), 3000):
                    writer.piece(begin, min(begin + 3000, len(data)))[:] = data[begin : begin + 3000]
                if self.tier.commit([writer]) == [True]:
                    self.committed[name] = data
        except TierError:
            pass

    def get(self, n: int) -> None:
        try:
            (found,) = get(self.tier, [key(n)])
        except TierError:
            return
        assert found is None or found == self.committed[key(n)]

    def remove(self, n: int) -> None:
        try:
            self.tier.remove([key(n)])
            self.committed.pop(key(n), None)
        except TierError:
            pass

    def check(self, tier: DiskTier) -> None:
        """What is there is what was committed."""
        names = [key(n) for n in range(12)]
        for name, found in zip(names, get(tier, names), strict=True):
            assert found is None or found == self.committed[name]


def work(trial: Trial) -> None:
    for n in range(4):
        trial.put(n, 6000 + 2000 * n)
    trial.get(0)
    trial.put(1, 9000)
    trial.remove(2)
    for n in range(4, 10):  # evicts
        trial.put(n, 8 * SLOT_BYTES)
    for n in (9, 8, 0):
        trial.get(n)
    trial.put(10, 100)


@pytest.mark.parametrize(
    "error, half",
    [(errno.ENOSPC, False), (errno.ENOSPC, True), (errno.EIO, False), (errno.EMFILE, False), (None, False)],
)
@pytest.mark.parametrize("lasts", [False, True])
def test_errors_at_every_call(tmp_path: Path, error: int | None, lasts: bool, half: bool, monkeypatch) -> None:
    """One that fails (half: half written), or it and all after it: nothing wrong comes out, nothing is lost, and all
    goes on afterwards. Without an error: reads and writes that are short.
    """
    for nth in range(1, 400):
        path = tmp_path / str(nth)
        tier = make(path)
        trial = Trial(tier)
        trial.put(11, 5000)

        def fails(name: str, arguments: tuple, nth: int = nth) -> bool:
            return fake.num_calls >= nth if lasts else fake.num_calls == nth

        with faulty(monkeypatch, fails, error, half) as fake:
            work(trial)
        there = {
            name
            for name, is_there in zip(trial.committed, tier.contains(list(trial.committed)), strict=True)
            if is_there
        }
        assert get(tier, list(there)) == [trial.committed[name] for name in there], "a record was lost by an error"
        trial.check(tier)
        tier.check()
        num_committed = len(trial.committed)
        trial.put(12, 3000)
        assert len(trial.committed) == num_committed + 1, "it did not recover"
        there = {
            name
            for name, is_there in zip(trial.committed, tier.contains(list(trial.committed)), strict=True)
            if is_there
        }
        tier.close()
        tier = make(path)
        tier.check()
        assert {info.key for info in tier.infos()} == there, "not what was there before it was opened again"
        trial.check(tier)
        assert get(tier, [key(12)]) == [trial.committed[key(12)]]
        tier.close()
        shutil.rmtree(path)
        if fake.num_calls < nth:
            return
    raise AssertionError("not every call was tried")


def test_a_failing_drive_leaves_the_others(tmp_path: Path, monkeypatch) -> None:
    """Records go to the drive that works; those of the other are misses until it is back."""
    tier = make(tmp_path / "a", tmp_path / "b")
    records = {key(n): record(key(n), 9000) for n in range(8)}
    for name, data in records.items():
        put(tier, {name: data})
    fds = {directory.spaces[0].segment._fd for directory in tier._room.directories[:1]}
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


def test_a_directory_that_cannot_be_made_again(tmp_path: Path) -> None:
    tier = make(tmp_path / "parent" / "tier")
    put(tier, {key(0): record(key(0), 9000)})
    shutil.rmtree(tmp_path / "parent")
    (tmp_path / "parent").write_text("in the way")
    for _ in range(2):
        assert tier.create(key(1), 100) is None
    assert tier.stats().errors == 2
    (tmp_path / "parent").unlink()
    assert put(tier, {key(1): record(key(1), 9000)}) == [True]
    tier.check()


def test_killed_while_writing(tmp_path: Path) -> None:
    """A record is its key's, whole, or not there; the headers lead to each other whenever the process dies."""
    rng, num_found = random.Random(0), 0
    for attempt in range(40):
        child = os.fork()
        if child == 0:
            _write_for_ever(tmp_path / "t", attempt)
        while not (tmp_path / "t" / f"ready{attempt}").exists():
            assert os.waitpid(child, os.WNOHANG) == (0, 0), "the child ended by itself"
        signal.sigtimedwait([], rng.uniform(0.001, 0.03))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        tier = make(tmp_path / "t", capacity=8 * SEGMENT_BYTES)
        names = [key(n) for n in range(40)]
        found = get(tier, names)
        for n, data in enumerate(found):
            assert data is None or data == record(names[n], 3000 + 700 * n)
        num_found += sum(data is not None for data in found)
        assert tier.stats().corrupted == 0, "a header was torn, or the walk has lost its way"
        tier.check()
        tier.close()
    assert num_found > 400


def _write_for_ever(path: Path, attempt: int) -> None:
    """In a child of its own, until it is killed."""
    try:
        tier, n = make(path, capacity=8 * SEGMENT_BYTES), attempt * 7
        (path / f"ready{attempt}").touch()
        while True:
            put(tier, {key(n % 40): record(key(n % 40), 3000 + 700 * (n % 40))})
            n += 1
    finally:
        os._exit(1)


class RecordingOS:
    """os, whose writes are kept from the disk, as it were: each since the last fsync may reach it or not."""

    def __init__(self) -> None:
        self.writes: list[tuple[int, bytes]] = []
        self.safe: list[tuple[int, bytes]] = []

    def __getattr__(self, name: str):
        return getattr(os, name)

    def pwrite(self, fd: int, data, offset: int) -> int:
        self.writes.append((offset, bytes(data)))
        return os.pwrite(fd, data, offset)

    def fsync(self, fd: int) -> None:
        self.safe += self.writes
        self.writes = []


@pytest.mark.parametrize("seed", range(6))
def test_power_lost(tmp_path: Path, seed: int, monkeypatch) -> None:
    """Of what was written since the last fsync any sectors arrive, in any order: still a miss or exact, and what was
    removed before it never comes back.
    """
    rng, path = random.Random(seed), tmp_path / "t"
    for _ in range(25):
        shutil.rmtree(path, ignore_errors=True)
        tier = make(path, capacity=SEGMENT_BYTES)
        put(tier, {key(0): record(key(0))})
        (file,) = path.glob("*.segment")
        start, fake, trial = file.read_bytes(), RecordingOS(), Trial(tier)
        trial.committed[key(0)] = record(key(0))
        ever, gone = {(key(0), record(key(0)))}, set()
        monkeypatch.setattr(disk_segment, "os", fake)
        for _ in range(rng.randint(5, 40)):
            n = rng.randrange(10)
            if rng.random() < 0.6:
                trial.put(n, 4 * rng.randint(10, 4000))
                ever |= set(trial.committed.items())
                gone.discard(key(n))
            elif rng.random() < 0.7:
                trial.remove(n)
            else:
                tier.flush(sync=True)
                gone = {key(n) for n in range(10)} - {info.key for info in tier.infos()}
        monkeypatch.undo()
        tier.close()
        file.write_bytes(_after_power_loss(start, fake, rng))
        tier = make(path, capacity=SEGMENT_BYTES)
        for name in {name for name, _ in ever}:
            (found,) = get(tier, [name])
            if is_right(name, found):
                assert (name, found) in ever and name not in gone
        tier.check()
        assert put(tier, {key(11): record(key(11))}) == [True]
        tier.check()
        tier.close()


def _after_power_loss(start: bytes, fake: RecordingOS, rng: random.Random) -> bytes:
    data = bytearray(start)
    for offset, written in fake.safe:
        data[offset : offset + len(written)] = written
    pending = [w for w in fake.writes if rng.random() < 0.7]
    rng.shuffle(pending)
    for offset, written in pending:
        is_torn = rng.random() < 0.3
        for begin in range(0, len(written), 512):
            if not is_torn or rng.random() < 0.5:
                data[offset + begin : offset + begin + len(written[begin : begin + 512])] = written[begin : begin + 512]
    return bytes(data)


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

"""Disks that fail and disks that lose their power, for tests of the disk tier."""

import ctypes
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import xxhash
from support import pwritev_hook
from support.pwritev_hook import PWRITEV
from support.store_records import get, key, record, write

from kvpage.store.disk import directory as disk_directory
from kvpage.store.disk import segment as disk_segment
from kvpage.store.disk.disk_tier import SLOT_BYTES, DiskTier
from kvpage.store.tiers.stretches import Runs
from kvpage.store.tiers.tier import TierError

SEGMENT_BYTES = 32 * SLOT_BYTES
CALLS = ("pwrite", "preadv", "pread", "posix_fallocate", "open", "fsync", "fstat")
SECTOR_BYTES = 512
PIECE_BYTES = 3 * SLOT_BYTES  # of a record's runs: it is written by several calls


def make(*paths: Path, capacity: int = 2 * SEGMENT_BYTES, **fields) -> DiskTier:
    return DiskTier(paths, capacity * len(paths), segment_bytes=SEGMENT_BYTES, retry_seconds=0, **fields)


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
        replace_os(patch, fake)
        yield fake


def replace_os(patch: pytest.MonkeyPatch, fake: object) -> None:
    """Replace the calls of the disk tier. The native writer calls the system by itself: its calls are replaced
    where the process has begun so, and elsewhere the writer, by a plain one.
    """
    patch.setattr(disk_segment, "os", fake)
    patch.setattr(disk_directory, "os", fake)
    patch.setattr(disk_segment, "punch_hole", getattr(fake, "punch_hole", disk_segment.punch_hole))
    if pwritev_hook.is_loaded():
        patch.setattr(PWRITEV, "write", lambda fd, data, offset: fake.pwrite(fd, data[:PIECE_BYTES], offset))
    else:
        patch.setattr(disk_segment, "write_stretches", plain_write_stretches)


def plain_write_stretches(
    fd: int, offset: int, lead: memoryview, runs: Runs, stretch_bytes: int, tail: memoryview, num_threads: int
) -> bytes:
    """Write as stretches.write_stretches does, in pieces, by the replacement of os.pwrite."""
    data = b"".join(ctypes.string_at(address, count) for address, count in runs.tolist())
    stretches = [data[at : at + stretch_bytes] for at in range(0, len(data), stretch_bytes)]
    end = len(data) - len(tail)
    written = memoryview(bytes(lead) + data[:end])
    for begin in range(0, len(written), PIECE_BYTES):
        disk_segment.write_all(fd, written[begin : begin + PIECE_BYTES], offset + begin)
    tail[:] = data[end:]
    return b"".join(map(xxhash.xxh3_128_digest, stretches))


class Trial:
    """Write, read and remove through all faults, and remember which records must be there and which may be."""

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
                write(writer, data, [*range(0, len(data), 3000), len(data)], runs_at=n % 4)
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

    def flush(self) -> None:
        with suppress(TierError):
            self.tier.flush(sync=True)

    def check(self, tier: DiskTier) -> None:
        """Assert that the records are those that were committed."""
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


def fail_at(path: Path, nth: int, error: int | None, half: bool, lasts: bool, job: Callable[[Trial], None]) -> bool:
    """The nth call of a job fails (half: half written), or it and all after it: nothing wrong comes out, nothing is
    lost, and all goes on afterwards. Without an error: reads and writes that are short. False: there are fewer calls.
    """
    tier = make(path)
    trial = Trial(tier)
    trial.put(11, 5000)

    def fails(name: str, arguments: tuple) -> bool:
        return fake.num_calls >= nth if lasts else fake.num_calls == nth

    with pytest.MonkeyPatch.context() as monkeypatch, faulty(monkeypatch, fails, error, half) as fake:
        job(trial)
    there = _there(trial)
    assert get(tier, list(there)) == [trial.committed[name] for name in there], "a record was lost by an error"
    trial.check(tier)
    tier.check()
    num_committed = len(trial.committed)
    trial.put(12, 3000)
    assert len(trial.committed) == num_committed + 1, "it did not recover"
    there = _there(trial)
    tier.close()
    tier = make(path)
    tier.check()
    assert {info.key for info in tier.infos()} == there, "not what was there before it was opened again"
    trial.check(tier)
    assert get(tier, [key(12)]) == [trial.committed[key(12)]]
    tier.close()
    return fake.num_calls >= nth


def delete_at(path: Path, nth: int, job: Callable[[Trial], None]) -> bool:
    """The directory is deleted at the nth call of a job: nothing wrong comes out, and all goes on in a new one. False:
    there are fewer calls.
    """
    tier = make(path)
    trial = Trial(tier)
    trial.put(11, 5000)

    def fails(name: str, arguments: tuple) -> bool:
        if fake.num_calls == nth:
            shutil.rmtree(path)
        return False

    with pytest.MonkeyPatch.context() as monkeypatch, faulty(monkeypatch, fails, None) as fake:
        job(trial)
    trial.check(tier)
    trial.put(12, 3000)
    assert key(12) in trial.committed, "it did not recover"
    tier.check()
    there = _there(trial)
    tier.close()
    tier = make(path)
    tier.check()
    assert there == {info.key for info in tier.infos()}, "not what was there before it was opened again"
    trial.check(tier)
    assert get(tier, [key(12)]) == [trial.committed[key(12)]]
    tier.close()
    return fake.num_calls >= nth


def _there(trial: Trial) -> set[bytes]:
    names = list(trial.committed)
    return {name for name, is_there in zip(names, trial.tier.contains(names), strict=True) if is_there}


class PowerLog:
    """os, whose writes are kept from the disk, as it were: each since its file's last fsync may reach it or not, and a
    new file's name and a longer one's length as well. `fsync` only takes note.

    events: ("length", file, bytes), ("write", file, offset, bytes), ("sync", file or directory).
    """

    def __init__(self) -> None:
        self.events: list[tuple] = []
        self._names: dict[int, str] = {}

    def __getattr__(self, name: str):
        return getattr(os, name)

    def open(self, path, *arguments: int) -> int:
        fd = os.open(path, *arguments)
        self._names[fd] = Path(path).name
        return fd

    def posix_fallocate(self, fd: int, offset: int, num_bytes: int) -> None:
        os.posix_fallocate(fd, offset, num_bytes)
        self.events.append(("length", self._names[fd], offset + num_bytes))

    def pwrite(self, fd: int, data, offset: int) -> int:
        self.events.append(("write", self._names[fd], offset, bytes(data)))
        return os.pwrite(fd, data, offset)

    def punch_hole(self, fd: int, offset: int, num_bytes: int) -> bool:
        self.pwrite(fd, bytes(num_bytes), offset)
        return True

    def fsync(self, fd: int) -> None:
        self.events.append(("sync", self._names[fd]))

    def files(self, at: int, directory: str, rng: random.Random) -> dict[str, bytes]:
        """The files as they may be found if the power was lost after `at` events."""
        events = self.events[:at]
        synced = {event[1]: index for index, event in enumerate(events) if event[0] == "sync"}
        made = {event[1]: index for index, event in reversed([*enumerate(events)]) if event[0] == "length"}
        lengths, least = self._lengths(events), {name: 0 for name in made}
        least |= {name: self._lengths(events[:index])[name] for name, index in synced.items() if name in made}
        files = {}
        for name, length in lengths.items():
            if synced.get(directory, -1) < made[name] and rng.random() < 0.2:
                continue  # nothing leads to it
            if length > least[name] and rng.random() < 0.2:
                length = rng.randrange(least[name] // SECTOR_BYTES, length // SECTOR_BYTES) * SECTOR_BYTES
            writes = [(index, event) for index, event in enumerate(events) if event[:2] == ("write", name)]
            files[name] = _torn(writes, synced.get(name, -1), lengths[name], rng)[:length]
        return files

    def _lengths(self, events: list[tuple]) -> dict[str, int]:
        """The files' lengths after these events."""
        lengths: dict[str, int] = {}
        for kind, name, *rest in events:
            if kind == "length":
                lengths[name] = max(lengths.get(name, 0), rest[0])
            elif kind == "write" and name in lengths:
                lengths[name] = max(lengths[name], rest[0] + len(rest[1]))
        return lengths


def _torn(writes: list[tuple[int, tuple]], synced: int, length: int, rng: random.Random) -> bytes:
    """Return the synced bytes, with any sectors of the others, in any order."""
    data = bytearray(length)
    for index, (_, _, offset, written) in writes:
        if index < synced:
            data[offset : offset + len(written)] = written
    pending = [event for index, event in writes if index >= synced and rng.random() < 0.7]
    rng.shuffle(pending)
    for _, _, offset, written in pending:
        is_torn = rng.random() < 0.3
        for begin in range(0, len(written), SECTOR_BYTES):
            if not is_torn or rng.random() < 0.5:
                sector = written[begin : begin + SECTOR_BYTES]
                data[offset + begin : offset + begin + len(sector)] = sector
    return bytes(data)

"""The native writer of stretches against a plain one: every byte of the file, digests, and what a file answers."""

import errno
import itertools
import mmap
import os
import random
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash
from support import pwritev_hook

from kvpage.store.tiers.stretches import Runs, write_stretches

PIECE = 1 << 20
POISON = 0xA5
DATA = np.random.default_rng(5).integers(0, 256, 21 << 20, dtype=np.uint8)


def cut(rng: random.Random, num_bytes: int, longest: int) -> Runs:
    """Runs of DATA from anywhere, together as long; an empty one among them."""
    runs, left = [(DATA.ctypes.data, 0)], num_bytes
    while left:
        count = min(rng.randint(1, longest), left)
        runs.append((DATA.ctypes.data + rng.randrange(len(DATA) - count + 1), count))
        left -= count
    return np.array(runs, np.int64)


def bytes_of(runs: Runs) -> bytes:
    base = DATA.ctypes.data
    return b"".join(DATA[at - base : at - base + count].tobytes() for at, count in runs.tolist())


def digests_of(data: bytes, stretch_bytes: int) -> bytes:
    pieces = (data[at : at + stretch_bytes] for at in range(0, len(data), stretch_bytes))
    return b"".join(map(xxhash.xxh3_128_digest, pieces))


def check(path: Path, offset: int, num_lead: int, runs: Runs, stretch_bytes: int, num_tail: int, threads: int) -> None:
    """Whatever the file, the tail, and what lies before and behind them are made of."""
    data, lead = bytes_of(runs), DATA[7 : 7 + num_lead].tobytes()
    end = offset + num_lead + len(data) - num_tail
    path.write_bytes(bytes([POISON]) * (end + 5000))
    room = np.full(num_lead + num_tail + 64, POISON, np.uint8)
    room[:num_lead] = np.frombuffer(lead, np.uint8)
    fd = os.open(path, os.O_WRONLY)
    try:
        # the tail begins where the lead does
        found = write_stretches(fd, offset, room[:num_lead].data, runs, stretch_bytes, room[:num_tail].data, threads)
    finally:
        os.close(fd)
    assert found == digests_of(data, stretch_bytes)
    whole = np.fromfile(path, np.uint8)
    expected = np.full(end + 5000, POISON, np.uint8)
    expected[offset:end] = np.frombuffer(lead + data[: len(data) - num_tail], np.uint8)
    np.testing.assert_array_equal(whole, expected)
    behind = lead[num_tail:] + bytes([POISON]) * (len(room) - max(num_lead, num_tail))
    assert room.tobytes() == data[len(data) - num_tail :] + behind


@pytest.mark.parametrize("num_bytes", [1, 2, 4095, 4096, 4097, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 17])
@pytest.mark.parametrize("num_lead, offset", [(0, 0), (1, 0), (832, 4096), (0, PIECE - 1), (4097, 3 * PIECE - 4096)])
def test_every_byte(tmp_path: Path, num_bytes: int, num_lead: int, offset: int) -> None:
    rng = random.Random(f"{num_bytes} {num_lead} {offset}")
    for num_tail in {0, 1, min(4095, num_bytes), num_bytes}:
        stretch = rng.choice([num_bytes, num_bytes + 1, max(num_bytes // 3, 1), 100_000])
        check(tmp_path / "f", offset, num_lead, cut(rng, num_bytes, 70_000), stretch, num_tail, 1)


@pytest.mark.parametrize("seed", range(6))
def test_threads_share_the_stretches(tmp_path: Path, seed: int) -> None:
    """Stretches longer and shorter than pieces, and tails that reach over several of both."""
    rng = random.Random(seed)
    num_bytes = rng.randint(12 * PIECE, 20 * PIECE)
    stretch, num_tail = rng.choice([PIECE // 3, PIECE, 2 * PIECE + 4099]), rng.choice([0, 77, 5 * PIECE])
    offset, num_lead = rng.randrange(3) * 4096 + rng.randrange(2), rng.randrange(5000)
    check(tmp_path / "f", offset, num_lead, cut(rng, num_bytes, 200_000), stretch, num_tail, rng.choice([2, 3, 7]))


def test_more_runs_than_one_call_takes(tmp_path: Path) -> None:
    rng = random.Random(0)
    for num_bytes, longest in ((1024, 1), (1025, 1), (5000, 1), (PIECE + 5000, 40)):
        check(tmp_path / "f", 4096, 64, cut(rng, num_bytes, longest), 1 << 20, 10, 1)


def test_bytes_that_change_when_they_are_written(tmp_path: Path) -> None:
    """The digest is of what they have become, and does not fit what the file has. Here the file is their memory."""
    path, old, new = tmp_path / "f", DATA[:4096], DATA[4096:8192]
    path.write_bytes(bytes(8192) + old.tobytes())
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        memory = np.frombuffer(mapped, np.uint8)
        runs = np.array([(memory.ctypes.data + 8192, 4096), (new.ctypes.data, 4096)], np.int64)
        digest = write_stretches(file.fileno(), 4096, memoryview(b""), runs, 8192, memoryview(bytearray()), 1)
        del memory
    assert path.read_bytes()[4096:] == old.tobytes() + new.tobytes()
    assert digest == xxhash.xxh3_128_digest(new.tobytes() * 2) != xxhash.xxh3_128_digest(path.read_bytes()[4096:])


# --- what a file answers ---


def fails(fd: int, error: int, num_threads: int = 1, num_bytes: int = 9 * PIECE) -> None:
    """The tail is as it was."""
    runs, tail = cut(random.Random(1), num_bytes, 300_000), np.full(4000, POISON, np.uint8)
    with pytest.raises(OSError) as caught:
        write_stretches(fd, 4096, DATA[:100].data, runs, PIECE, tail.data, num_threads)
    assert caught.value.errno == error and (tail == POISON).all()


@pytest.fixture
def file_limit() -> Iterator[int]:
    """Beyond it a file cannot be written: the write that crosses it is a short one."""
    before, limit = resource.getrlimit(resource.RLIMIT_FSIZE), 3 * PIECE + 12345
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_file_that_may_not_grow(tmp_path: Path, file_limit: int, num_threads: int) -> None:
    fd = os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT)
    try:
        fails(fd, errno.EFBIG, num_threads)
        found = os.pread(fd, 9 * PIECE, 4096)
    finally:
        os.close(fd)
    data = DATA[:100].tobytes() + bytes_of(cut(random.Random(1), 9 * PIECE, 300_000))
    assert len(found) == file_limit - 4096, "not up to the limit"
    assert found == data[: len(found)]


FULL = f"""
import errno, os, sys
import numpy as np
from kvpage.store.tiers.stretches import runs_of, write_stretches
data = np.arange({8 * PIECE}, dtype=np.int64).view(np.uint8)[:{8 * PIECE}]
fd = os.open(sys.argv[1] + "/f", os.O_RDWR | os.O_CREAT)
try:
    write_stretches(fd, 100, memoryview(b""), runs_of(data), {PIECE}, memoryview(bytearray(10)), 1)
except OSError as error:
    assert error.errno == errno.ENOSPC, error
    found = os.pread(fd, {9 * PIECE}, 100)
    assert len(found) > {PIECE} and found == data[: len(found)].tobytes(), len(found)
    print("full")
"""


def test_a_disk_that_becomes_full(tmp_path: Path) -> None:
    """A small one, mounted where nobody else sees it."""
    mount = 'mount -t tmpfs -o size=4m kvpage-test "$1" || exit 77; exec "$2" -c "$3" "$1"'
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare, to mount a file system")
    command = ["unshare", "--mount", "sh", "-c", mount, "sh", str(tmp_path), sys.executable, FULL]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip(f"needs the right to mount a file system: {done.stderr.strip()}")
    assert done.stdout == "full\n", done.stderr


class Short:
    """Interrupted, then one byte, then half a piece, and so on."""

    def __init__(self) -> None:
        self.num_calls = itertools.count()

    def __call__(self, fd: int, data: bytes, offset: int) -> int:
        kind = next(self.num_calls) % 4
        if kind == 0:
            raise InterruptedError(errno.EINTR, "interrupted")
        return os.pwrite(fd, data[: [0, 1, (len(data) + 1) // 2, len(data)][kind]], offset)


def with_pwritev(folder: Path, replacement: str, test: str) -> None:
    """Runs a test of this file with another pwritev than the system's, in a process of its own. folder: where it runs,
    since Python would look for kvpage there.
    """
    if pwritev_hook.missing():
        pytest.skip(pwritev_hook.missing())
    here = Path(__file__).parent
    folders = [str(here), str(here.parents[1]), str(here.parents[1] / "reliability")]
    code = f"import sys; sys.path[:0] = {folders}; import test_stretch_writer as t; "
    code += f"t.pwritev_hook.PWRITEV.write = {replacement}; t.{test}; assert t.pwritev_hook.PWRITEV.num_calls"
    command, environment = [sys.executable, "-c", code], pwritev_hook.environment()
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("num_threads", [1, 3])
def test_short_writes_go_on(tmp_path: Path, num_threads: int) -> None:
    runs = "t.cut(t.random.Random(3), 13 * t.PIECE, 90_000)"
    with_pwritev(
        tmp_path, "t.Short()", f"check(t.Path({str(tmp_path / 'f')!r}), 4096, 99, {runs}, t.PIECE, 9, {num_threads})"
    )


def test_a_file_that_takes_nothing(tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    call = f"fails(t.os.open({str(tmp_path / 'f')!r}, t.os.O_WRONLY), t.errno.EIO)"
    with_pwritev(tmp_path, "lambda fd, data, offset: 0", call)


# --- arguments ---


def test_arguments(tmp_path: Path) -> None:
    """ValueError, and nothing is written."""
    fd = os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT)
    runs = np.array([[DATA.ctypes.data, 10]], np.int64)
    negative, huge = runs * [1, -1], np.array([[DATA.ctypes.data, 2**62]] * 2, np.int64)
    for match, offset, some, stretch, num_tail in [
        ("offset must not be negative, got -1", -1, runs, 5, 0),
        ("stretch_bytes must be positive, got 0", 0, runs, 0, 0),
        ("runs must have bytes, got none", 0, runs[:0], 5, 0),
        ("runs must have lengths that fit a file, got -10", 0, negative, 5, 0),
        (f"runs must have lengths that fit a file, got {2**62}", 0, huge, 5, 0),
        ("tail_bytes must be in .0, 10., got 11", 0, runs, 5, 11),
        ("lead_bytes must be in .0, 0., got 3", 2**63 - 1, runs, 5, 0),
        ("runs must be .n, 2.", 0, runs[0], 5, 0),
    ]:
        tail = np.full(num_tail, POISON, np.uint8)
        with pytest.raises(ValueError, match=match):
            write_stretches(fd, offset, memoryview(b"abc"), some, stretch, tail.data, 1)
        assert (tail == POISON).all()
    assert os.fstat(fd).st_size == 0
    os.close(fd)

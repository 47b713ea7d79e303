"""The native reader of stretches against a plain one: every byte of the destination, digests, errors of the file."""

import errno
import os
import random
from pathlib import Path

import numpy as np
import pytest
import xxhash

from kvpage.store.tiers.stretches import read_stretches

POISON = 0xA5
DATA = np.random.default_rng(9).integers(0, 256, (13 << 20) + 77, dtype=np.uint8)


def spread(rng: random.Random, num_bytes: int, longest: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return poisoned memory, runs of it in another order with gaps, some unwanted, and what is to be in it."""
    lengths = [0]
    while sum(lengths) < num_bytes:
        lengths.append(min(rng.randint(1, longest), num_bytes - sum(lengths)))
    room = np.full(num_bytes + 64 * len(lengths), POISON, np.uint8)
    expected, runs, free = room.copy(), np.zeros((len(lengths), 2), np.int64), 0
    begins = np.cumsum([0, *lengths])
    for index in rng.sample(range(len(lengths)), len(lengths)):
        free += rng.randrange(64)
        runs[index, 1] = count = lengths[index]
        if rng.random() < 0.8:
            runs[index, 0] = room.ctypes.data + free
            expected[free : free + count] = DATA[begins[index] : begins[index] + count]
        free += count
    return room, runs, expected


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("num_bytes", [0, 1, 4096, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, len(DATA)])
def test_every_byte_and_digest(tmp_path: Path, num_bytes: int, num_threads: int) -> None:
    rng = random.Random(num_bytes)
    (tmp_path / "f").write_bytes(bytes(99) + DATA.tobytes())
    fd = os.open(tmp_path / "f", os.O_RDONLY)
    for stretch_bytes, longest, room_bytes in [
        (1 << 20, 90_000, 2 << 20),
        (300_001, 2 << 20, 65_536 * 3),
        (5000, 70_000, 1000),
    ]:
        room, runs, expected = spread(rng, num_bytes, longest)
        found = read_stretches(fd, 99, runs, stretch_bytes, memoryview(bytearray(room_bytes)), num_threads)
        data = DATA[:num_bytes].tobytes()
        stretches = [data[at : at + stretch_bytes] for at in range(0, num_bytes, stretch_bytes)]
        assert found == b"".join(map(xxhash.xxh3_128_digest, stretches))
        assert (room == expected).all()
    os.close(fd)


def test_errors_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(100))
    room, piece = np.full(101, POISON, np.uint8), memoryview(bytearray(4096))
    runs = np.array([[room.ctypes.data, 101]], np.int64)
    for flags, error in [(os.O_RDONLY, errno.ENODATA), (os.O_WRONLY, errno.EBADF)]:
        fd = os.open(tmp_path / "f", flags)
        with pytest.raises(OSError) as caught:
            read_stretches(fd, 0, runs, 50, piece, 1)
        assert caught.value.errno == error
        os.close(fd)


def test_arguments() -> None:
    """ValueError, and nothing is written."""
    room, piece = np.full(10, POISON, np.uint8), memoryview(bytearray(10))
    run = np.array([[room.ctypes.data, 10]], np.int64)
    for match, offset, runs, stretch_bytes, into in [
        ("offset must not be negative, got -1", -1, run, 5, piece),
        ("stretch_bytes must be positive, got 0", 0, run, 0, piece),
        ("room must have bytes, got none", 0, run, 5, piece[:0]),
        ("runs must have lengths that fit a file, got -10", 0, run * [1, -1], 5, piece),
        ("runs must have lengths that fit a file, got 10", 2**63 - 6, run, 5, piece),
        ("runs must be .n, 2.", 0, run[0], 5, piece),
    ]:
        with pytest.raises(ValueError, match=match):
            read_stretches(0, offset, runs, stretch_bytes, into, 1)
    assert (room == POISON).all()

"""The native gathering and scattering of stretches against plain ones: every byte of the destination, and digests."""

import itertools
import random

import numpy as np
import pytest
import xxhash

from kvpage.store.tiers.stretches import gather_stretches, scatter_stretches

POISON = 0xA5
DATA = np.random.default_rng(7).integers(0, 256, 5 << 20, dtype=np.uint8)
SIZES = [0, 1, 63, 64, 65, 1023, 1024, 1025, 240, 241, 100_000, 3 << 20]


def digests_of(data: bytes, stretch_bytes: int) -> bytes:
    pieces = (data[at : at + stretch_bytes] for at in range(0, len(data), stretch_bytes))
    return b"".join(map(xxhash.xxh3_128_digest, pieces))


def cuts(rng: random.Random, num_bytes: int, longest: int) -> list[int]:
    """Return lengths that make up as many bytes, an empty one among them."""
    lengths = [0]
    while num_bytes:
        lengths.append(min(rng.randint(1, longest), num_bytes))
        num_bytes -= lengths[-1]
    rng.shuffle(lengths)
    return lengths


@pytest.mark.parametrize("num_threads, streaming", [*itertools.product([1, 3], [False, True])])
@pytest.mark.parametrize("num_bytes", SIZES)
def test_gather(num_bytes: int, num_threads: int, streaming: bool) -> None:
    rng = random.Random(num_bytes)
    for stretch_bytes, longest in [(1, 1)] * (num_bytes < 300) + [(64, 50), (1000, 5000), (70_000, 300_000)]:
        if num_bytes // min(stretch_bytes, longest) > 20_000:
            continue
        lengths = cuts(rng, num_bytes, longest)
        begins = [rng.randrange(len(DATA) - count + 1) for count in lengths]
        runs = np.array([(DATA.ctypes.data + at, n) for at, n in zip(begins, lengths, strict=True)], np.int64)
        wanted = b"".join(DATA[at : at + n].tobytes() for at, n in zip(begins, lengths, strict=True))
        room = np.full(num_bytes + 128, POISON, np.uint8)
        offset = rng.choice([0, 1, 64])
        to = room[offset : offset + num_bytes].data
        assert gather_stretches(runs, to, stretch_bytes, num_threads, streaming) == digests_of(wanted, stretch_bytes)
        assert bytes(to) == wanted
        assert (room[:offset] == POISON).all() and (room[offset + num_bytes :] == POISON).all()


@pytest.mark.parametrize("num_threads, streaming", [*itertools.product([1, 3], [False, True])])
@pytest.mark.parametrize("num_bytes", SIZES)
def test_scatter(num_bytes: int, num_threads: int, streaming: bool) -> None:
    """Runs lie in another order than the bytes, with gaps; some are not wanted."""
    rng = random.Random(num_bytes)
    data = DATA[5 : 5 + num_bytes]
    for stretch_bytes, longest in [(1, 1)] * (num_bytes < 300) + [(64, 50), (1000, 5000), (70_000, 300_000)]:
        if num_bytes // min(stretch_bytes, longest) > 20_000:
            continue
        lengths = cuts(rng, num_bytes, longest)
        room = np.full(num_bytes + 64 * len(lengths), POISON, np.uint8)
        expected, runs, at, free = room.copy(), np.zeros((len(lengths), 2), np.int64), 0, 0
        places = {}
        for index in rng.sample(range(len(lengths)), len(lengths)):
            free += rng.randrange(64)
            places[index] = free
            free += lengths[index]
        for index, count in enumerate(lengths):
            runs[index, 1] = count
            if rng.random() < 0.8:
                runs[index, 0] = room.ctypes.data + places[index]
                expected[places[index] : places[index] + count] = data[at : at + count]
            at += count
        found = scatter_stretches(data, runs, stretch_bytes, num_threads, streaming)
        assert found == digests_of(data.tobytes(), stretch_bytes)
        assert (room == expected).all()


def test_arguments() -> None:
    """ValueError, and nothing is written."""
    room = np.full(10, POISON, np.uint8)
    run = np.array([[DATA.ctypes.data, 10]], np.int64)
    for match, runs, stretch_bytes in [
        ("stretch_bytes must be positive, got 0", run, 0),
        ("runs must have lengths that make up the payload, got -10", run * [1, -1], 5),
        ("runs must have lengths that make up the payload, got 11", run + [0, 1], 5),
        ("runs must be as long as the payload, 1 bytes are missing", run - [0, 1], 5),
        ("runs must be .n, 2.", run[0], 5),
    ]:
        with pytest.raises(ValueError, match=match):
            gather_stretches(runs, room, stretch_bytes, 1, False)
        with pytest.raises(ValueError, match=match):
            scatter_stretches(room, runs, stretch_bytes, 1, False)
    with pytest.raises(ValueError, match="runs must have addresses, got 0"):
        gather_stretches(run * [0, 1], room, 5, 1, False)
    assert (room == POISON).all()

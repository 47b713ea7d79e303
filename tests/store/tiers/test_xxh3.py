"""The native XXH3-128 against the package xxhash: every kernel, length and way of cutting."""

import numpy as np
import pytest
import xxhash

import kvpage._C as _C

DATA = np.random.default_rng(7).integers(0, 256, 1 << 20, dtype=np.uint8)
LENGTHS = range(2049)  # two whole blocks of 1024, and every short way
EDGES = (0, 1, 63, 64, 65, 240, 241, 1023, 1024, 1025, 2047, 2048, 2049, 4096, 5000)


def kernels() -> list[str]:
    names = []
    for name in ("base", "avx2", "avx512"):
        try:
            _C._Xxh3(name)
        except ValueError:
            continue
        names.append(name)
    return names


@pytest.fixture(params=kernels())
def kernel(request) -> str:
    return request.param


def aligned(num_bytes: int, off: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Room `off` bytes behind a cache line's beginning; what lies before it, and behind."""
    room = np.full(num_bytes + 256, 0xAB, np.uint8)
    begin = -room.ctypes.data % 64 + 64 + off
    return room[begin : begin + num_bytes], room[:begin], room[begin + num_bytes :]


def test_every_short_length(kernel):
    for length in LENGTHS:
        hash_ = _C._Xxh3(kernel)
        hash_.update(DATA[:length].tobytes())
        assert hash_.digest() == xxhash.xxh3_128_digest(DATA[:length].tobytes()), length


@pytest.mark.parametrize("length", [300, 1024, 1025, 2100])
def test_every_split_in_two(kernel, length):
    data = DATA[:length].tobytes()
    expected = xxhash.xxh3_128_digest(data)
    for split in range(length + 1):
        hash_ = _C._Xxh3(kernel)
        hash_.update(data[:split])
        assert hash_.digest() == xxhash.xxh3_128_digest(data[:split])  # and goes on after it
        hash_.update(data[split:])
        assert hash_.digest() == expected, split


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("off", [0, 1, 32])
def test_copies_what_it_hashes_and_no_more(kernel, streaming, off):
    for first in (0, 1, 1000, 1024):
        for length in (*EDGES, 20_000):
            hash_ = _C._Xxh3(kernel)
            hash_.update(DATA[:first].tobytes())
            source = DATA[first : first + length]
            room, before, behind = aligned(length, off)
            hash_.update_and_copy(source.ctypes.data, length, room.ctypes.data, streaming)
            assert hash_.digest() == xxhash.xxh3_128_digest(DATA[: first + length].tobytes())
            np.testing.assert_array_equal(room, source)
            assert (before == 0xAB).all() and (behind == 0xAB).all()


@pytest.mark.parametrize("num_threads", [1, 2])
def test_stretches(num_threads):
    for length, stretch in [(0, 5), (1, 5), (5, 5), (6, 5), (1 << 20, 1 << 16), (999_999, 4096), (10, 1 << 40)]:
        found = _C.xxh3_128_of_stretches(DATA.ctypes.data, length, stretch, num_threads)
        pieces = [DATA[at : min(at + stretch, length)].tobytes() for at in range(0, length, stretch)]
        assert found == b"".join(map(xxhash.xxh3_128_digest, pieces))


def test_whole_copy():
    room, _, _ = aligned(1 << 20, 0)
    digest = _C.copy_and_xxh3_128(DATA.ctypes.data, room.ctypes.data, len(DATA), True)
    assert digest == xxhash.xxh3_128_digest(DATA.tobytes())
    np.testing.assert_array_equal(room, DATA)


def test_arguments():
    with pytest.raises(ValueError, match="stretch_bytes must be positive, got 0"):
        _C.xxh3_128_of_stretches(DATA.ctypes.data, 1, 0, 1)
    with pytest.raises(ValueError, match="num_bytes must not be negative, got -1"):
        _C.xxh3_128_of_stretches(DATA.ctypes.data, -1, 1, 1)
    with pytest.raises(ValueError, match="kernel must be one that this machine has, got sse9"):
        _C._Xxh3("sse9")

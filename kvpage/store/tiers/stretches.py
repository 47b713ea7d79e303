"""Stretches of bytes and their digests, xxh3-128 each, one behind the other: what a record's checksum is made of."""

import numpy as np
import numpy.typing as npt

import kvpage._C as _C

Bytes = memoryview | npt.NDArray[np.uint8]
Runs = npt.NDArray[np.int64]
"""[n, 2]: address and length of each of n runs of bytes that somebody else keeps alive, one behind the other."""


def address_of(data: Bytes) -> int:
    """Of contiguous bytes that somebody else keeps alive; they may be read-only."""
    return np.frombuffer(data, np.uint8).ctypes.data if len(data) else 0


def digests_of(data: Bytes, stretch_bytes: int, num_threads: int = 1) -> bytes:
    """Of each stretch of the data, the last of which may be shorter. ValueError unless stretch_bytes is positive."""
    return _C.xxh3_128_of_stretches(address_of(data), len(data), stretch_bytes, num_threads)


def digest_of(data: Bytes) -> bytes:
    return digests_of(data, max(len(data), 1)) or _C._Xxh3("").digest()


def copy_and_digest(to: Bytes, data: Bytes, streaming: bool = False) -> bytes:
    """RecordCopies as many bytes as both have, which do not overlap, and reads them once; their digest. streaming: past the
    processor's cache.
    """
    if len(to) != len(data):
        raise ValueError(f"both must have as many bytes, got {len(to)} and {len(data)}")
    return _C.copy_and_xxh3_128(address_of(data), address_of(to), len(data), streaming)


def runs_of(data: Bytes) -> Runs:
    """One, of contiguous bytes."""
    return np.array([[address_of(data), len(data)]], np.int64)


def write_stretches(
    fd: int, offset: int, lead: memoryview, runs: Runs, stretch_bytes: int, tail: memoryview, num_threads: int
) -> bytes:
    """Writes the lead, then the runs to the file from `offset` on, but for the runs' last bytes, as many as the tail
    has, which are copied there afterwards: it may lie where the lead does. The digests of the runs' stretches.

    Each byte is read from memory once. What changes meanwhile has a wrong digest, or is what was hashed. OSError: any
    of the bytes may have been written, and the tail is as it was. ValueError for runs without bytes or shorter than the
    tail, and for a negative offset.
    """
    return _C.write_stretches(fd, offset, lead, runs, stretch_bytes, tail, num_threads)

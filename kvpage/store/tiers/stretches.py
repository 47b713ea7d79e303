"""Stretches of bytes and their xxh3-128 digests, one after the other, from which a record's checksum is made."""

import ctypes

import numpy as np
import numpy.typing as npt

import kvpage._C as _C

Bytes = bytes | memoryview | npt.NDArray[np.uint8]
Runs = npt.NDArray[np.int64]
"""int64 [n, 2]: address and length of n runs of bytes, one after the other, which their owner keeps alive."""


def address_of(data: Bytes) -> int:
    """Return the address of contiguous bytes, which their owner keeps alive; they may be read-only."""
    address: int = np.frombuffer(data, np.uint8).__array_interface__["data"][0] if len(data) else 0
    return address


def memory_at(address: int, num_bytes: int) -> memoryview:
    """Return a view of memory, which its owner keeps alive."""
    return memoryview((ctypes.c_ubyte * num_bytes).from_address(address)).cast("B")


def digests_of(data: Bytes, stretch_bytes: int, num_threads: int = 1) -> bytes:
    """Return the digest of each stretch; the last may be shorter. stretch_bytes must be positive (ValueError)."""
    return _C.xxh3_128_of_stretches(address_of(data), len(data), stretch_bytes, num_threads)


def digest_of(data: Bytes) -> bytes:
    """Return the digest of all of the data, 16 bytes."""
    if not len(data):
        return _C._Xxh3("").digest()
    return _C.xxh3_128_of_stretches(address_of(data), len(data), len(data), 1)


def copy_and_digest(to: Bytes, data: Bytes, streaming: bool = False) -> bytes:
    """Copy bytes that do not overlap, reading them once, and return their digest.

    streaming: write past the processor's cache. Raises ValueError unless both have as many bytes.
    """
    if len(to) != len(data):
        raise ValueError(f"both must have as many bytes, got {len(to)} and {len(data)}")
    return _C.copy_and_xxh3_128(address_of(data), address_of(to), len(data), streaming)


def gather_stretches(runs: Runs, to: Bytes, stretch_bytes: int, num_threads: int, streaming: bool) -> bytes:
    """Copy the runs' bytes, one after the other, and return the digest of each stretch of the copy.

    Each byte is read once. streaming: write past the processor's cache. Raises ValueError unless the runs are as long
    as the copy.
    """
    return _C.gather_stretches(runs, address_of(to), len(to), stretch_bytes, num_threads, streaming)


def scatter_stretches(data: Bytes, runs: Runs, stretch_bytes: int, num_threads: int, streaming: bool) -> bytes:
    """Copy the bytes to the runs, one after the other, and return the digest of each stretch of the data.

    A run at address 0 takes no bytes. Otherwise as gather_stretches.
    """
    return _C.scatter_stretches(address_of(data), len(data), runs, stretch_bytes, num_threads, streaming)


def runs_of(data: Bytes) -> Runs:
    """Return one run, of contiguous bytes."""
    return np.array([[address_of(data), len(data)]], np.int64)


def cut_runs(runs: Runs, ends: npt.NDArray[np.int64], begin: int, end: int) -> Runs:
    """Return the runs of the bytes [begin, end), at least one. ends: the bytes up to the end of each run."""
    first = int(np.searchsorted(ends, begin, side="right"))
    last = int(np.searchsorted(ends, end, side="left"))
    cut = runs[first : last + 1].copy()
    skipped = begin - (int(ends[first]) - int(cut[0, 1]))
    cut[-1, 1] -= int(ends[last]) - end
    cut[0, 1] -= skipped
    cut[0, 0] += skipped if cut[0, 0] else 0
    return cut


def write_stretches(
    fd: int, offset: int, lead: memoryview, runs: Runs, stretch_bytes: int, tail: memoryview, num_threads: int
) -> bytes:
    """Write the lead, then the runs, to the file from `offset` on, and return the digests of the runs' stretches.

    The runs' last bytes, as many as the tail has, are not written. They are copied to the tail afterwards, which may
    overlap the lead. Each byte is read from memory once: bytes that change meanwhile have a wrong digest, or are those
    that were hashed.

    Raises OSError: any of the bytes may have been written, and the tail is as it was. Raises ValueError for runs
    without bytes or shorter than the tail, and for a negative offset.
    """
    return _C.write_stretches(fd, offset, lead, runs, stretch_bytes, tail, num_threads)


def read_stretches(fd: int, offset: int, runs: Runs, stretch_bytes: int, room: memoryview, num_threads: int) -> bytes:
    """Read the file from `offset` on into the runs, and return the digests of the stretches.

    room: memory for pieces of the file. A run at address 0 takes no bytes.

    Raises OSError, ENODATA where the file ends too early: any of the bytes may have been written. Raises ValueError for
    a negative offset.
    """
    return _C.read_stretches(fd, offset, runs, stretch_bytes, room, num_threads)

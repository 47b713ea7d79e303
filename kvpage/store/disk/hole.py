"""Hole: bytes inside a file that take no space on the disk, and read as zeros."""

import ctypes
from functools import cache

KEEP_SIZE, PUNCH_HOLE = 1, 2  # of fallocate(2)


def punch_hole(fd: int, offset: int, num_bytes: int) -> bool:
    """Give the space of these bytes back to the file system. Returns False where it cannot: they stay as they are."""
    fallocate = _fallocate()
    return fallocate is not None and fallocate(fd, KEEP_SIZE | PUNCH_HOLE, offset, num_bytes) == 0


@cache
def _fallocate() -> "ctypes._NamedFuncPointer | None":
    call = getattr(ctypes.CDLL(None), "fallocate", None)
    if call is not None:
        call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return call

"""Memory that is touched is there, and holds what it held."""

import ctypes
import mmap
import os
import subprocess
import sys

import native_build
import numpy as np
import pytest

import kvpage._C as _C
from kvpage.layout.host_memory import zero_bytes

PAGE = mmap.PAGESIZE
NUM_BYTES = 70 << 20  # three portions of a thread


def num_resident(data: np.ndarray) -> int:
    """Return the pages of the array that are in memory."""
    begin = data.ctypes.data // PAGE * PAGE
    count = -(-(data.ctypes.data + len(data) - begin) // PAGE)
    found = (ctypes.c_ubyte * count)()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(begin), ctypes.c_size_t(count * PAGE), found) == 0
    return sum(one & 1 for one in found)


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("num_bytes", [0, 1, PAGE, PAGE + 1, NUM_BYTES - 5])
def test_all_pages_are_there_and_no_byte_is_another(num_threads: int, num_bytes: int) -> None:
    room = zero_bytes(NUM_BYTES + 2 * PAGE)
    room[3 : 3 + num_bytes : 7777] = 5
    before = room[: 3 + num_bytes].copy() if num_bytes < NUM_BYTES - 5 else None
    _C.prefault(room.ctypes.data + 3, num_bytes, num_threads)
    wanted = room[3 : 3 + num_bytes]
    if num_bytes:
        assert num_resident(wanted) == -(-(3 % PAGE + num_bytes) // PAGE)
        assert (wanted[::7777] == 5).all() and np.count_nonzero(wanted) == len(wanted[::7777])
    assert before is None or (room[: 3 + num_bytes] == before).all()


def test_memory_that_is_not_there() -> None:
    with pytest.raises(OSError, match="Cannot allocate memory"):
        _C.prefault(PAGE, PAGE, 1)  # no process has this page
    with pytest.raises(ValueError, match="num_bytes must not be negative, got -1"):
        _C.prefault(0, -1, 1)


def test_a_system_that_cannot_populate() -> None:
    """As Linux before 5.14: pages are written."""
    if native_build.missing():
        pytest.skip(native_build.missing())
    library = native_build.library("no_populate")
    code = f"import sys; sys.path[:0] = {sys.path!r}; import test_prefault as t; "
    code += "t.test_all_pages_are_there_and_no_byte_is_another(3, t.NUM_BYTES - 5)"
    environment = {**os.environ, "LD_PRELOAD": str(library)}
    folder = os.path.dirname(__file__)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr

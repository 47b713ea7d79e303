"""The driver's own batched copy, cuMemcpyBatchAsync, without kvpage: the peer and the bound of swaps by copy engines.

A call takes arrays of destinations, sources and sizes. They are made once, before anything is timed.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

VERSION = 12080  # the first whose call this is; later drivers still have it under this number
STREAM_ORDER, PREFER_OVERLAP = 1, 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM, CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Attributes(ctypes.Structure):
    _fields_ = [
        ("srcAccessOrder", ctypes.c_int),
        ("srcLocHint", _Location),
        ("dstLocHint", _Location),
        ("flags", ctypes.c_uint),
    ]


def find_call(driver: Any = None) -> Any | None:
    """Return cuMemcpyBatchAsync, or None where no driver has it. driver: its library; by default the machine's."""
    if driver is None:
        try:
            driver = ctypes.CDLL("libcuda.so.1")
        except OSError:
            return None
    address, status = ctypes.c_void_p(), ctypes.c_int()
    found = driver.cuGetProcAddress_v2(
        b"cuMemcpyBatchAsync", ctypes.byref(address), VERSION, ctypes.c_uint64(0), ctypes.byref(status)
    )
    if found or not address.value:
        return None
    pointers, sizes = ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_size_t)
    kinds = (pointers, pointers, sizes, ctypes.c_size_t, ctypes.POINTER(_Attributes), sizes, ctypes.c_size_t, sizes)
    return ctypes.CFUNCTYPE(ctypes.c_int, *kinds, ctypes.c_void_p)(address.value)


class RawBatchCopy:
    """One call of `find_call` that copies pieces of one size between addresses."""

    def __init__(self, call: Any, sources: Sequence[int], destinations: Sequence[int], piece_bytes: int) -> None:
        number = len(sources)
        self._call, self._number = call, number
        self._sources = (ctypes.c_uint64 * number)(*sources)
        self._destinations = (ctypes.c_uint64 * number)(*destinations)
        self._sizes = (ctypes.c_size_t * number)(*[piece_bytes] * number)
        self._attributes = _Attributes(STREAM_ORDER, _Location(), _Location(), PREFER_OVERLAP)
        self._first, self._failed = ctypes.c_size_t(0), ctypes.c_size_t(0)

    def run(self, stream: int) -> None:
        """Enqueue the copies on a stream that is not the legacy default one. RuntimeError: the driver refuses."""
        error = self._call(
            self._destinations,
            self._sources,
            self._sizes,
            self._number,
            ctypes.byref(self._attributes),
            ctypes.byref(self._first),
            1,
            ctypes.byref(self._failed),
            stream,
        )
        if error:
            raise RuntimeError(f"cuMemcpyBatchAsync failed with error {error} at piece {self._failed.value}")

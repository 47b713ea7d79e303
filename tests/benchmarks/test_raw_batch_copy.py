"""The driver's batched copy as a benchmark calls it, of a fake driver that copies host memory."""

import ctypes

import pytest

from kvpage.benchmarks import raw_batch_copy
from kvpage.benchmarks.raw_batch_copy import RawBatchCopy, find_call

pointers, sizes = ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_size_t)
KIND = ctypes.CFUNCTYPE(
    ctypes.c_int, pointers, pointers, sizes, ctypes.c_size_t, ctypes.c_void_p, sizes, ctypes.c_size_t, sizes,
    ctypes.c_void_p,
)  # fmt: skip


class Driver:
    """cuGetProcAddress_v2 and a cuMemcpyBatchAsync of this ABI. error: what the copy returns."""

    def __init__(self, error=0, is_known=True):
        self.seen, self.is_known = [], is_known

        @KIND
        def copy(destinations, sources, lengths, count, attributes, first, num_attributes, failed, stream):
            words = ctypes.cast(attributes, ctypes.POINTER(ctypes.c_uint))
            self.seen.append((count, [words[i] for i in range(6)], first[0], num_attributes, stream))
            failed[0] = 1
            for i in range(count):
                ctypes.memmove(destinations[i], sources[i], lengths[i])
            return error

        self._copy = copy

    def cuGetProcAddress_v2(self, name, address, version, flags, status):
        assert (name, version) == (b"cuMemcpyBatchAsync", 12080)
        if self.is_known:
            address._obj.value = ctypes.cast(self._copy, ctypes.c_void_p).value
        return 0


def test_pieces_are_copied_in_one_call_in_the_streams_order():
    driver = Driver()
    source, target = ctypes.create_string_buffer(bytes(range(64)), 64), ctypes.create_string_buffer(64)
    at, to = ctypes.addressof(source), ctypes.addressof(target)
    RawBatchCopy(find_call(driver), [at + 8, at + 40], [to + 16, to], 8).run(77)
    assert target.raw == bytes(range(40, 48)) + bytes(8) + bytes(range(8, 16)) + bytes(40)
    assert driver.seen == [(2, [1, 0, 0, 0, 0, 1], 0, 1, 77)], "the stream's order; copies beside computation"


def test_errors_and_drivers_without_it(monkeypatch):
    buffer = ctypes.create_string_buffer(8)
    copy = RawBatchCopy(find_call(Driver(error=999)), [ctypes.addressof(buffer)], [ctypes.addressof(buffer)], 8)
    with pytest.raises(RuntimeError, match="cuMemcpyBatchAsync failed with error 999 at piece 1"):
        copy.run(0)
    assert find_call(Driver(is_known=False)) is None

    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(raw_batch_copy.ctypes, "CDLL", missing)
    assert find_call() is None

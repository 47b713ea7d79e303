"""PinnedMemory: host memory that a GPU's copies reach, in exactly the pages that were asked for.

    mmap ─► huge pages ─► touched, by threads ─► registered with CUDA, a piece a thread ─► a tensor over it
                                                 a failure unregisters the pieces before it
    the last tensor is gone, or the interpreter ends ─► each piece is unregistered ─► unmapped

torch's own pinned memory is rounded up to a power of two: 70 GiB would take 128.

A copy must not cross the border of two pieces: CUDA refuses it. A forked child has zeros in place of the memory, and
neither unregisters nor shares it.
"""

import contextlib
import ctypes
import errno
import functools
import math
import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import as_completed
from typing import Any, Protocol

import numpy as np
import torch

from kvpage.checks.device_lock import synchronize
from kvpage.checks.interrupts import HeldInterrupts, interruptible
from kvpage.checks.started_pool import started_pool
from kvpage.layout.host_memory import HUGE_PAGE_BYTES, touch
from kvpage.layout.shown_progress import shown_progress

PAGE_BYTES = mmap.PAGESIZE
WIPE_ON_FORK = 18  # MADV_WIPEONFORK of Linux 4.14, for which Python has no name
REGISTER_FLAGS = 1 | 2  # cudaHostRegisterPortable, cudaHostRegisterMapped: for every device, at the same address


class Registrar(Protocol):
    """Locks pages of host memory for a GPU. Its methods are called in any thread."""

    def register(self, address: int, num_bytes: int) -> None:
        """Lock whole pages. Raises OSError if they cannot be."""

    def unregister(self, address: int) -> None:
        """Undo the call of `register` with this address. Raises OSError if that fails."""


class CudaRegistrar:
    """CUDA's own registration, by the runtime that torch uses.

    device: whose context registers. By default the current device, or one that has a context already: another would be
    made otherwise.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call, unused-ignore]  # not annotated
        self._device = device or torch.device("cuda", _device_with_context())

    def register(self, address: int, num_bytes: int) -> None:
        with torch.cuda.device(self._device):
            code = int(self._runtime.cudaHostRegister(address, num_bytes, REGISTER_FLAGS))
            if code:
                self._take_error()
        if code:
            raise OSError(errno.ENOMEM, f"cudaHostRegister of {num_bytes} bytes has returned error {code}")

    def unregister(self, address: int) -> None:
        for index in _devices_with_context():  # a copy under way still uses the pages
            synchronize(index)
        with torch.cuda.device(self._device):
            code = int(self._runtime.cudaHostUnregister(address))
            if code:
                self._take_error()
        if code:
            raise OSError(errno.EINVAL, f"cudaHostUnregister has returned error {code}")

    def _take_error(self) -> None:
        """Take the error from the runtime: the next launch of torch's would raise it."""
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=self._device)


def _devices_with_context() -> list[int]:
    has_context = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    if has_context is None:
        return [torch.cuda.current_device()]
    return [index for index in range(torch.cuda.device_count()) if has_context(index)]


def _device_with_context() -> int:
    """Return the current device if it has a context, else another that has one, if any does."""
    current, others = torch.cuda.current_device(), _devices_with_context()
    return current if current in others or not others else others[0]


make_registrar: Callable[[], Registrar] = CudaRegistrar
"""Makes the registrar; tests put their own in its place."""


class PinnedMemory:
    """One run of zeroed memory that begins at a huge page, as an array of its bytes: numpy.asarray takes it.

    It is mapped at once, and registered by `register_all`. No other such memory adjoins it.

    Args:
        num_bytes: bytes that are needed; whole pages are given.
        registrar: locks the pages.
        piece_bytes: bytes that are registered in one call, whole pages; None for all.

    Attributes:
        address: of the first byte.
        pieces: (address, bytes) of each piece, in order.

    Raises:
        OSError: there is no such room of addresses.
    """

    def __init__(self, num_bytes: int, registrar: Registrar, piece_bytes: int | None = None) -> None:
        self.num_bytes = num_bytes
        whole = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
        self._map = mmap.mmap(-1, whole + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        begin = np.frombuffer(self._map, np.uint8).ctypes.data
        self.address = begin + -begin % HUGE_PAGE_BYTES
        for advice in (getattr(mmap, "MADV_HUGEPAGE", None), WIPE_ON_FORK):
            _advise(self._map, advice)
        size = piece_bytes or max(whole, 1)
        self.pieces = [(self.address + at, min(size, whole - at)) for at in range(0, whole, size)]
        self._registrar, self._registered = registrar, list[int]()
        self._end = weakref.finalize(self, _unregister, registrar, self._registered, self._map, os.getpid())
        self.__array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 3,
        }

    def register(self, piece: tuple[int, int]) -> int:
        """Register a piece and return its bytes. Raises OSError."""
        address, num_bytes = piece
        self._registrar.register(address, num_bytes)
        self._registered.append(address)
        return num_bytes

    def unregister(self) -> None:
        """Unregister the registered pieces. A second call does nothing."""
        self._end()


def register_all(memories: Sequence[PinnedMemory], num_threads: int, advance: Callable[[int], object]) -> None:
    """Register all pieces, by threads; after an error, and after Ctrl-C, none is.

    advance: called with the bytes of each piece when it is registered.

    Raises:
        OSError: a piece cannot be locked.
    """
    work = [functools.partial(memory.register, piece) for memory in memories for piece in memory.pieces]
    if not work:
        return
    with HeldInterrupts():
        pool = started_pool(min(num_threads, len(work)), "kvpage-pin")
        try:
            futures = [pool.submit(registration) for registration in work]
            for future in as_completed(futures):
                advance(future.result())
                with interruptible():  # between two pieces
                    pass
        except BaseException:
            pool.shutdown(cancel_futures=True)
            for memory in memories:
                memory.unregister()
            raise
        pool.shutdown()


def pinned_zeros(
    sizes: Sequence[Sequence[int]], dtype: torch.dtype, name: str, piece_bytes: int | None = None
) -> list[torch.Tensor]:
    """Return tensors of zeros in memory that is there and registered, each as large as its whole pages.

    Args:
        sizes: of each tensor.
        dtype: of all.
        name: of the memory, for errors and progress.
        piece_bytes: bytes of a tensor that are registered in one call, whole pages; None for all of it. No copy may
            cross the border of two pieces.

    Raises:
        OSError: the system has less memory, or cannot lock it. Nothing stays registered.
    """
    registrar, num_threads = make_registrar(), torch.get_num_threads()
    sizes_in_bytes = [math.prod(size) * dtype.itemsize for size in sizes]
    memories = [PinnedMemory(num_bytes, registrar, piece_bytes) for num_bytes in sizes_in_bytes]
    arrays = [torch.from_numpy(np.asarray(memory)) for memory in memories]
    touch(arrays, name)
    total = sum(sizes_in_bytes)
    try:
        with shown_progress(f"pinning {name}", total) as advance:
            register_all(memories, num_threads, advance)
    except OSError as error:
        raise OSError(
            error.errno, f"{name} must have {total} bytes that can be pinned, got less: {error.strerror}"
        ) from error
    return [array.view(dtype).view(*size) for array, size in zip(arrays, sizes, strict=True)]


def _advise(memory: mmap.mmap, advice: int | None) -> None:
    try:
        if advice is not None:
            memory.madvise(advice)
    except OSError:  # a system that does not know it
        pass


def _unregister(registrar: Registrar, registered: list[int], memory: mmap.mmap, pid: int) -> None:
    """Unregister the pieces, the last one first. Memory of which one stays registered is never unmapped."""
    if pid != os.getpid():  # they are the parent's
        return
    for at in reversed(range(len(registered))):
        try:
            registrar.unregister(registered[at])
            del registered[at]
        except (OSError, RuntimeError):  # CUDA has ended, or has failed
            pass
    if registered:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))

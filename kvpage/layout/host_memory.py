"""Host memory in huge pages, where the system has them for callers that ask: random reads are faster.

Blocks are read in an order that no processor foresees, and in pages of 4 KiB the look-up of an address takes as long as
reading half a page (measured: blocks of 32 KiB are read a quarter faster in huge pages).
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

import kvpage._C as _C
from kvpage.layout.shown_progress import shown_progress

HUGE_PAGE_BYTES = 2 << 20
PORTION_BYTES = 1 << 30  # that is touched before Ctrl-C is seen: 0.1 s


def zeros(size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """As torch.zeros on the CPU; large ones begin at a huge page. The system gives memory when it is first written."""
    num_bytes = math.prod(size) * dtype.itemsize
    if num_bytes < 2 * HUGE_PAGE_BYTES:
        return torch.zeros(*size, dtype=dtype)
    return torch.from_numpy(zero_bytes(num_bytes)).view(dtype).view(*size)


def zero_bytes(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Return zeros that begin at a huge page."""
    room = np.zeros(num_bytes + HUGE_PAGE_BYTES, np.uint8)  # numpy asks for huge pages (madvise), torch does not
    begin = -room.ctypes.data % HUGE_PAGE_BYTES
    return room[begin : begin + num_bytes]


def prefault(memory: torch.Tensor, num_threads: int, advance: Callable[[int], object]) -> None:
    """Have the system give the memory of a contiguous CPU tensor now, not when it is first written.

    The bytes stay as they are; no thread may write them meanwhile. Ctrl-C ends it between two portions.

    Args:
        memory: the tensor.
        num_threads: threads that share the work.
        advance: called with the bytes of each portion, when it is there.

    Raises:
        OSError: the system has no more memory.
    """
    for begin in range(0, memory.nbytes, PORTION_BYTES):
        num_bytes = min(PORTION_BYTES, memory.nbytes - begin)
        _C.prefault(memory.data_ptr() + begin, num_bytes, num_threads)
        advance(num_bytes)


def touch(memories: Sequence[torch.Tensor], name: str) -> None:
    """Have the system give the memory of contiguous CPU tensors, by as many threads as torch uses, with progress.

    Otherwise the first write into each place waits for the system to clear it, page by page. The bytes stay.

    Args:
        memories: the tensors.
        name: of the memory, for errors and progress.

    Raises:
        OSError: there is less memory than that.
    """
    num_bytes = sum(memory.nbytes for memory in memories)
    with shown_progress(f"touching {name}", num_bytes) as advance:
        try:
            for memory in memories:
                prefault(memory, torch.get_num_threads(), advance)
        except OSError as error:
            raise OSError(
                error.errno, f"{name} must have {num_bytes} bytes of memory, got less: {error.strerror}"
            ) from error

"""ResultPool: host memory of results, which is used again when the caller's tensors are gone.

    empty(shape) ─► memory that was used before, or new ─► a tensor ─► the caller, views of it, ...
         ▲                                                                   │ the last of them is gone
         └── kept, at most `max_bytes`; the oldest goes first ◄──────────────┘

The system clears new memory page by page when it is first written. That takes several times as long as a copy into
memory that was written before.
"""

import math
import weakref
from collections import deque

import numpy as np
import numpy.typing as npt
import torch

from kvpage.layout.host_memory import HUGE_PAGE_BYTES, zero_bytes
from kvpage.store.records.record import Shape

Memory = npt.NDArray[np.uint8]
LEAST_BYTES = 2 * HUGE_PAGE_BYTES  # smaller results come from torch
MOST_WASTE = 2  # kept memory serves results down to half of its size


class Slab:
    """Memory of a result that is gone. Two slabs are never equal, as arrays would be element by element."""

    __slots__ = ("memory",)

    def __init__(self, memory: Memory) -> None:
        self.memory = memory


class ResultPool:
    """Thread-safe. max_bytes: of memory that is kept; 0 keeps none.

    Without a lock: memory comes back in finalizers, which run anywhere, also where Ctrl-C has just ended a call.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: deque[Slab] = deque()  # the oldest first; a thread that takes a slab out has it alone

    @property
    def num_bytes(self) -> int:
        """Return the bytes of memory that is kept."""
        return sum(len(slab.memory) for slab in self._kept.copy())

    def empty(self, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        """Return host memory of any content; pinned if there is a GPU, by torch's own pool of such memory."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if torch.cuda.is_available() or num_bytes < LEAST_BYTES:
            return torch.empty(shape, dtype=dtype, pin_memory=torch.cuda.is_available())
        memory = self._take(num_bytes)
        lent = memory[:num_bytes]  # torch keeps this very array, as long as there is a view of the tensor
        finalizer = weakref.finalize(lent, self._give, memory)
        finalizer.atexit = False
        return torch.from_numpy(lent).view(dtype).view(shape)

    def close(self) -> None:
        """Let go of all memory, and of memory that comes back later."""
        self._max_bytes = 0
        self._trim()

    def _take(self, num_bytes: int) -> Memory:
        while fitting := [
            slab for slab in self._kept.copy() if num_bytes <= len(slab.memory) <= MOST_WASTE * num_bytes
        ]:
            best = min(fitting, key=lambda slab: len(slab.memory))
            try:
                self._kept.remove(best)
            except ValueError:  # another thread has it now
                continue
            return best.memory
        return zero_bytes(num_bytes)

    def _give(self, memory: Memory) -> None:
        self._kept.append(Slab(memory))
        self._trim()

    def _trim(self) -> None:
        """Let go of the oldest that are too many."""
        while self.num_bytes > self._max_bytes:
            try:
                self._kept.popleft()
            except IndexError:  # another thread has let go of it
                return

"""ResultPool: host memory of results, which is used again when the caller's tensors are gone.

    empty(shape) ─► memory that was used before, or new ─► a tensor ─► the caller, views of it, ...
         ▲                                                                   │ the last of them is gone
         └── kept, at most `max_bytes`; the oldest goes first ◄──────────────┘

The system clears new memory page by page when it is first written. That takes several times as long as a copy into
memory that was written before.
"""

import math
import threading
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


class ResultPool:
    """Thread-safe. max_bytes: of memory that is kept; 0 keeps none."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._kept: list[Memory] = []  # the oldest first
        self._returned: deque[Memory] = deque()  # finalizers run anywhere, and may wait for no lock

    @property
    def num_bytes(self) -> int:
        """Return the bytes of memory that is kept."""
        with self._lock:
            self._sort_in()
            return sum(len(memory) for memory in self._kept)

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
        """Let go of all memory, also of what comes back later."""
        self._max_bytes = 0
        with self._lock:
            self._sort_in()

    def _take(self, num_bytes: int) -> Memory:
        with self._lock:
            self._sort_in()
            fitting = [memory for memory in self._kept if num_bytes <= len(memory) <= MOST_WASTE * num_bytes]
            if fitting:
                best = min(fitting, key=len)
                self._kept = [memory for memory in self._kept if memory is not best]
                return best
        return zero_bytes(num_bytes)

    def _give(self, memory: Memory) -> None:
        """Take memory back, in a finalizer. Whoever holds the lock sorts it in, now or before its next use."""
        self._returned.append(memory)
        while self._returned and self._lock.acquire(blocking=False):
            try:
                self._sort_in()
            finally:
                self._lock.release()

    def _sort_in(self) -> None:
        """Keep what has come back, and let go of the oldest that are too many; with the lock held."""
        while self._returned:
            self._kept.append(self._returned.popleft())
        num_bytes = sum(len(memory) for memory in self._kept)
        while num_bytes > self._max_bytes:
            num_bytes -= len(self._kept.pop(0))

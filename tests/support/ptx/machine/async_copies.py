"""Asynchronous copies to shared memory (cp.async): they land where they are waited for, and not before."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from support.ptx.machine.threads import Lanes, Threads


@dataclass(frozen=True, slots=True)
class Copy:
    """One instruction's copies. wanted: bytes that come from the source; zeros fill the rest."""

    lanes: np.ndarray
    group: np.ndarray
    places: np.ndarray
    addresses: np.ndarray
    num_bytes: int
    wanted: np.ndarray
    what: object

    def of(self, some: np.ndarray) -> "Copy":
        arrays = (self.lanes, self.group, self.places, self.addresses)
        return Copy(*(array[some] for array in arrays), self.num_bytes, self.wanted[some], self.what)


class AsyncCopies:
    """The copies in flight, and each thread's number of committed groups."""

    def __init__(self, threads: "Threads") -> None:
        self.threads = threads
        self.num_groups = np.zeros(threads.count, np.int64)
        self.pending: list[Copy] = []

    def issue(
        self,
        lanes: "Lanes",
        places: np.ndarray,
        addresses: np.ndarray,
        num_bytes: int,
        wanted: np.ndarray,
        what: object,
    ) -> None:
        """Note copies; from now on nobody else may touch what they will write."""
        threads, reads = self.threads, wanted > 0
        threads.memory.place(addresses[reads], num_bytes, what)
        if threads.shared_log:
            threads.shared_log.write(places, threads.numbers(lanes), num_bytes, what)
        indices = threads.indices(lanes)
        self.pending.append(Copy(indices, self.num_groups[indices], places, addresses, num_bytes, wanted, what))

    def commit(self, lanes: "Lanes") -> None:
        self.num_groups[lanes] += 1

    def wait(self, lanes: "Lanes", num_left: int) -> None:
        """Land the threads' copies, but for their last groups."""
        waiting = np.zeros(self.threads.count, bool)
        waiting[lanes] = True
        left = []
        for copy in self.pending:
            ready = waiting[copy.lanes] & (copy.group < self.num_groups[copy.lanes] - num_left)
            self._land(copy.of(ready))
            if not ready.all():
                left.append(copy.of(~ready))
        self.pending = left

    def _land(self, copy: Copy) -> None:
        threads, reads = self.threads, copy.wanted > 0
        if not len(copy.places):
            return
        if threads.shared_log:
            threads.shared_log.write(copy.places, copy.lanes + threads.first_thread, copy.num_bytes, copy.what)
        sources = threads.memory.place(copy.addresses[reads], copy.num_bytes, copy.what)
        if threads.memory.log:
            numbers = copy.lanes[reads] + threads.first_thread
            threads.memory.log.read(sources, numbers, copy.num_bytes, copy.what)
        rows = np.zeros((len(copy.places), copy.num_bytes), np.uint8)
        rows[reads] = threads.memory.bytes[sources[:, None] + np.arange(copy.num_bytes)]
        rows[np.arange(copy.num_bytes) >= copy.wanted[:, None]] = 0
        threads.shared[copy.places[:, None] + np.arange(copy.num_bytes)] = rows

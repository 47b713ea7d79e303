"""Races: two threads that touch the same place, one of them writing, where nothing orders them.

A place remembers its last writer and its last two readers, each with the time. What a thread did before a barrier of
its thread block is ordered before all that the block's other threads do after it. The same holds for a warp's own
barriers. Threads of two thread blocks are never ordered.
"""

import numpy as np
from support.ptx.scalars import PtxError

NOBODY = -1


class Clock:
    """The time of a launch, and since when each thread is ordered after the rest of its warp and of its block."""

    def __init__(self, num_threads: int, threads_per_block: int) -> None:
        self.now = 1
        self.block_size = threads_per_block
        self.warp_since = np.zeros(num_threads, np.int32)
        self.block_since = np.zeros(num_threads, np.int32)

    def tick(self) -> None:
        self.now += 1

    def order_warps(self, threads: np.ndarray) -> None:
        self.tick()
        self.warp_since[threads] = self.now

    def order_blocks(self, threads: np.ndarray) -> None:
        self.order_warps(threads)
        self.block_since[threads] = self.now

    def unordered(self, others: np.ndarray, times: np.ndarray, threads: np.ndarray) -> np.ndarray:
        """Return where what others did at these times is not ordered before what the threads do now."""
        same_warp = others >> 5 == threads >> 5
        since = np.where(same_warp, self.warp_since[threads], self.block_since[threads])
        together = others // self.block_size == threads // self.block_size
        return (others != NOBODY) & (others != threads) & ~(together & (times < since))


class AccessLog:
    """Who touched each unit of a memory, of `unit` bytes."""

    def __init__(self, num_bytes: int, unit: int, clock: Clock) -> None:
        self.unit, self.clock = unit, clock
        size = num_bytes // unit + 1
        self.writer, self.reader, self.second = (np.full(size, NOBODY, np.int32) for _ in range(3))
        self.written, self.read_at, self.second_at = (np.zeros(size, np.int32) for _ in range(3))

    def units(self, places: np.ndarray, threads: np.ndarray, num_bytes: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the units of accesses of so many bytes, and their threads."""
        count = max(num_bytes // self.unit, 1)
        first = places // self.unit
        if count == 1:
            return first, threads
        return (first[:, None] + np.arange(count)).reshape(-1), np.repeat(threads, count)

    def read(self, places: np.ndarray, threads: np.ndarray, num_bytes: int, what: object) -> None:
        self.clock.tick()
        units, threads = self.units(places, threads, num_bytes)
        self._check(self.writer[units], self.written[units], threads, "reads what another wrote", what)
        other = self.reader[units]
        moved = (other != threads) & (other != NOBODY)
        self.second[units[moved]], self.second_at[units[moved]] = other[moved], self.read_at[units[moved]]
        self.reader[units], self.read_at[units] = threads, self.clock.now
        several = self.reader[units] != threads
        self.second[units[several]], self.second_at[units[several]] = threads[several], self.clock.now

    def write(self, places: np.ndarray, threads: np.ndarray, num_bytes: int, what: object) -> None:
        self.clock.tick()
        units, threads = self.units(places, threads, num_bytes)
        self._check(self.writer[units], self.written[units], threads, "writes what another wrote", what)
        self._check(self.reader[units], self.read_at[units], threads, "writes what another reads", what)
        self._check(self.second[units], self.second_at[units], threads, "writes what another reads", what)
        self.writer[units], self.written[units] = threads, self.clock.now

    def _check(self, others: np.ndarray, times: np.ndarray, threads: np.ndarray, what: str, where: object) -> None:
        wrong = self.clock.unordered(others, times, threads)
        if wrong.any():
            i = int(np.argmax(wrong))
            raise PtxError(f"race: thread {threads[i]} {what}, thread {others[i]}: {where}")

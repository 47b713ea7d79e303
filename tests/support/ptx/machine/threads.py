"""Threads: all of a batch of thread blocks, with their registers and their blocks' shared memory."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from support.ptx.machine.access_log import AccessLog, Clock
from support.ptx.machine.async_copies import AsyncCopies
from support.ptx.machine.global_memory import GlobalMemory
from support.ptx.scalars import UNSIGNED, PtxError
from support.ptx.source.program import Entry, aligned

WARP = 32
Lanes = slice | np.ndarray  # all threads, or the indices of some
Step = Callable[["Threads", Lanes], None]


@dataclass(frozen=True, slots=True)
class Batch:
    """Blocks `first` to `first + count` of a grid, of `block_size` threads each."""

    grid: tuple[int, int, int]
    block_size: int
    first: int
    count: int


class Threads:
    """Registers hold garbage before they are written, as shared memory does."""

    def __init__(
        self, entry: Entry, batch: Batch, parameters: bytes, shared: int, memory: GlobalMemory, clock: Clock
    ) -> None:
        self.entry, self.batch, self.memory, self.clock = entry, batch, memory, clock
        self.count = batch.count * batch.block_size
        self.block = np.repeat(np.arange(batch.count), batch.block_size)
        self.first_thread = batch.first * batch.block_size
        self.garbage = np.random.default_rng(batch.first)
        self.registers: dict[str, np.ndarray] = {}
        self.special = _special_registers(batch)
        self.parameters = np.frombuffer(parameters + bytes(16), np.uint8)
        self.shared_end = shared + entry.shared_bytes
        self.shared_stride = aligned(self.shared_end, 1024)
        self.shared = self.garbage.integers(0, 256, batch.count * self.shared_stride + 16, dtype=np.uint8)
        self.shared_words = {size: self.shared.view(UNSIGNED[8 * size]) for size in (1, 2, 4, 8)}
        self.shared_log: AccessLog | None = None
        self.copies = AsyncCopies(self)

    def watch(self, unit: int) -> None:
        """Check accesses to shared memory for races, by places of so many bytes."""
        self.shared_log = AccessLog(len(self.shared), unit, self.clock)

    def register(self, name: str) -> np.ndarray:
        if name not in self.registers:
            bits = self.entry.registers[name]
            garbage = self.garbage.integers(0, 2**bits, self.count, dtype=UNSIGNED[max(bits, 8)])
            self.registers[name] = garbage.astype(bool) if bits == 1 else garbage
        return self.registers[name]

    def size(self, lanes: Lanes) -> int:
        return self.count if isinstance(lanes, slice) else len(lanes)

    def indices(self, lanes: Lanes) -> np.ndarray:
        return np.arange(self.count) if isinstance(lanes, slice) else lanes

    def numbers(self, lanes: Lanes) -> np.ndarray:
        """Return the threads' numbers in the launch."""
        return self.indices(lanes) + self.first_thread

    def warps(self, lanes: Lanes, what: object) -> np.ndarray:
        """Return the threads as [warps, 32].

        Raises:
            PtxError: only a part of a warp is here.
        """
        indices = self.indices(lanes)
        whole = len(indices) % WARP == 0 and not (indices[::WARP] % WARP).any()
        if not whole or (indices[WARP - 1 :: WARP] - indices[::WARP] != WARP - 1).any():
            raise PtxError(f"a warp is not together: {what}")
        return indices.reshape(-1, WARP)

    def shared_place(self, lanes: Lanes, addresses: np.ndarray, num_bytes: int, what: object) -> np.ndarray:
        """Return where in the array of all blocks' shared memory accesses of so many bytes begin.

        Raises:
            PtxError: one is out of bounds, or not aligned to its size.
        """
        places = addresses.astype(np.int64)
        if (places + num_bytes > self.shared_end).any():
            raise PtxError(f"out of bounds: {num_bytes} of {self.shared_end} bytes at {places.max()}: {what}")
        if (places & (num_bytes - 1)).any():
            raise PtxError(f"misaligned: {num_bytes} bytes in shared memory: {what}")
        return places + self.block[lanes] * self.shared_stride


def _special_registers(batch: Batch) -> dict[str, np.ndarray]:
    block = batch.first + np.repeat(np.arange(batch.count), batch.block_size)
    thread = np.tile(np.arange(batch.block_size), batch.count)
    x, y, z = batch.grid
    values = {"%laneid": thread % WARP, "%warpid": thread // WARP, "%smid": block % 108, "%clock": block}
    axes = {"tid": (thread, 0, 0), "ntid": (batch.block_size, 1, 1), "nctaid": batch.grid}
    axes["ctaid"] = (block % x, block // x % y, block // (x * y))
    values |= {f"%{name}.{axis}": part for name, parts in axes.items() for axis, part in zip("xyz", parts, strict=True)}
    return {name: np.broadcast_to(value, block.shape).astype(np.uint32) for name, value in values.items()}

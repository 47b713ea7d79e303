"""Kernel: compiled PTX that can be launched on the CPU, with memory, barriers and races checked."""

import struct
from collections.abc import Iterable, Sequence

import numpy as np
from support.ptx.machine.access_log import Clock
from support.ptx.machine.execution import Execution, Pick, Program
from support.ptx.machine.global_memory import GlobalMemory, Region
from support.ptx.machine.threads import Batch, Threads
from support.ptx.opcodes.memory import space_of
from support.ptx.opcodes.table import build
from support.ptx.scalars import PtxError, width
from support.ptx.source.parser import parse
from support.ptx.source.program import Instruction

Value = int | float | bytes
MAX_THREADS = 2**14  # of a batch: more make arrays that leave the cache


class Kernel:
    """An entry of a module. Every opcode must be known, those that are never reached, too."""

    def __init__(self, ptx: str, name: str | None = None) -> None:
        self.entry = parse(ptx, name)
        self.program = Program.of(self.entry, build)
        self.shared_unit = _smallest_access(self.entry.instructions, "shared")
        self.global_unit = _smallest_access(self.entry.instructions, "global")

    def pack(self, values: Sequence[Value]) -> bytes:
        """Return the parameters' bytes. What is missing at the end is zero."""
        parameters = list(self.entry.parameters.values())
        packed = bytearray(self.entry.parameter_bytes)
        for parameter, value in zip(parameters, values, strict=False):
            data = _bytes_of(value, parameter.kind, parameter.num_bytes)
            packed[parameter.start : parameter.start + len(data)] = data
        return bytes(packed)

    def launch(
        self,
        grid: tuple[int, int, int],
        block_size: int,
        parameters: bytes,
        regions: Iterable[Region],
        shared: int = 0,
        pick: Pick | None = None,
        finds_races: bool = True,
    ) -> None:
        """Run all blocks and write memory back.

        Args:
            regions: what the kernel may touch: addresses and bytes.
            shared: bytes of shared memory, besides the entry's own.
            pick: chooses the next warp among those that can run.

        Raises:
            PtxError: a thread does what it must not; memory is then as it was.
        """
        if block_size % 32 or not 0 < block_size <= 1024:
            raise PtxError(f"block_size must be a multiple of 32 of at most 1024, got {block_size}")
        memory, total = GlobalMemory(regions), int(np.prod(grid))
        clock = Clock(total * block_size, block_size)
        if finds_races:
            memory.watch(clock, self.global_unit)
        step = max(1, MAX_THREADS // block_size)
        for first in range(0, total, step):
            batch = Batch(grid, block_size, first, min(step, total - first))
            threads = Threads(self.entry, batch, parameters, shared, memory, clock)
            if finds_races:
                threads.watch(self.shared_unit)
            Execution(self.program, threads, pick).run()
        memory.write_back()


def random_picks(seed: int) -> Pick:
    """Return what lets one warp after the other go on, at random."""
    rng = np.random.default_rng(seed)
    return lambda warps: int(rng.choice(warps))


def _bytes_of(value: Value, kind: str, num_bytes: int) -> bytes:
    if isinstance(value, (bytes, bytearray)):
        return bytes(value[:num_bytes])
    if kind[0] == "f":
        return struct.pack({4: "<f", 8: "<d"}[num_bytes], value)
    return (int(value) & (2 ** (8 * num_bytes) - 1)).to_bytes(num_bytes, "little")


def _smallest_access(instructions: Iterable[Instruction], space: str) -> int:
    """Return the bytes of the smallest places that instructions touch in a space: races are found by such places."""
    sizes = [16]
    for instruction in instructions:
        if instruction.opcode in ("ld", "st", "atom", "red") and space_of(instruction) == space:
            sizes.append(width(instruction.kind) // 8)
        elif instruction.opcode in ("ldmatrix", "stmatrix", "cp", "wgmma"):
            sizes.append(4)
    return min(sizes)

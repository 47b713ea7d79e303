"""wgmma: products of 64 rows by four warps, whose right matrix, and maybe the left one, is in shared memory.

It runs where it is issued. Its own barriers and waits change nothing then.

    descriptor    bits 0-13 start, 16-29 leading offset, 32-45 stride, in units of 16 bytes; 62-63 the swizzle
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from support.ptx.machine.threads import WARP, Lanes, Step, Threads
from support.ptx.opcodes.elementwise import Build
from support.ptx.opcodes.matrices import COLUMN, ROW, accumulated, gathered, left_matrix
from support.ptx.scalars import PtxError, numbers
from support.ptx.source.operands import Immediate, Operand, Vector, items_of
from support.ptx.source.program import Instruction
from support.ptx.values import reader, spread, writer

GROUP = 4 * WARP
DEPTH = 16  # elements of two bytes that one instruction multiplies
_PITCHES = {1: 128, 2: 64, 3: 32}  # bytes of a row by the kind of swizzle
Fetch = Callable[[Threads, Lanes], np.ndarray]


@dataclass(frozen=True, slots=True)
class Descriptor:
    """Where a matrix lies in shared memory, of each warp group: [groups] each."""

    start: np.ndarray
    leading: np.ndarray
    stride: np.ndarray
    pitch: int

    @staticmethod
    def of(words: np.ndarray, what: Instruction) -> "Descriptor":
        by_group = words.reshape(-1, GROUP)
        first = by_group[:, 0].astype(np.int64)
        modes = first >> 62 & 3
        if (by_group != by_group[:, :1]).any() or (modes != modes[0]).any() or modes[0] == 0 or (first >> 49 & 7).any():
            raise PtxError(f"not supported: this descriptor: {what}")
        start, leading, stride = ((first >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
        return Descriptor(start, leading, stride, _PITCHES[int(modes[0])])

    def addresses(self, num_rows: int, transposed: bool) -> np.ndarray:
        """Return [groups, num_rows, 16]: where each element begins, swizzled."""
        row, depth = np.arange(num_rows)[:, None], np.arange(DEPTH)[None, :]
        start, leading, stride = (each[:, None, None] for each in (self.start, self.leading, self.stride))
        if transposed:
            per = self.pitch // 2
            at = start + row // per * leading + depth // 8 * stride + depth % 8 * self.pitch + row % per * 2
        else:
            at = start + row // 8 * stride + row % 8 * self.pitch + depth * 2
        return at ^ ((at >> 7 & (self.pitch // 16 - 1)) << 4)


def matrix_in_shared(operand: Operand, num_rows: int, transposed: bool, kind: str, what: Instruction) -> Fetch:
    """Return what fetches [groups, num_rows, 16]."""
    read = reader(operand, "u64")

    def fetch(threads: Threads, lanes: Lanes) -> np.ndarray:
        at = Descriptor.of(spread(read, threads, lanes), what).addresses(num_rows, transposed)
        if (at + 2 > threads.shared_end).any():
            raise PtxError(f"out of bounds: shared memory has {threads.shared_end} bytes: {what}")
        leaders = threads.indices(lanes)[::GROUP]
        places = at + (threads.block[leaders] * threads.shared_stride)[:, None, None]
        if threads.shared_log:
            who = np.broadcast_to(threads.numbers(leaders)[:, None, None], places.shape).reshape(-1)
            threads.shared_log.read(places.reshape(-1), who, 2, what)
        return numbers(threads.shared_words[2][places // 2], kind).astype(np.float64)

    return fetch


def multiply(instruction: Instruction) -> Step:
    """wgmma.mma_async: [64, 16] times [16, n], plus what the registers hold where the predicate says so."""
    kinds = [part for part in instruction.parts if part in ("f32", "f16", "bf16", "tf32", "e4m3", "e5m2")]
    if kinds[0] != "f32" or kinds[1] not in ("f16", "bf16"):
        raise PtxError(f"not supported: {instruction}")
    target, first, second, predicate, *signs = instruction.operands
    width = int(re.search(r"m64n(\d+)k16", instruction.text)[1])
    from_registers = isinstance(first, Vector)
    sign, transposed = _signs(signs)
    if from_registers:
        left = _left_in_registers(items_of(first), kinds[1])
    else:
        left = matrix_in_shared(first, 64, transposed[0], kinds[1], instruction)
    right = matrix_in_shared(second, width, transposed[-1], kinds[2], instruction)
    keeps, reads = reader(predicate, "pred"), [reader(item, "f32") for item in items_of(target)]
    writes = [writer(item) for item in items_of(target)]

    def step(threads: Threads, lanes: Lanes) -> None:
        check_groups(threads, lanes, instruction)
        product = sign * (left(threads, lanes) @ right(threads, lanes).transpose(0, 2, 1))
        product = product.reshape(-1, 16, width)
        kept = spread(keeps, threads, lanes)
        for i, (read, write) in enumerate(zip(reads, writes, strict=True)):
            part = product[:, ROW + 8 * (i >> 1 & 1), 8 * (i >> 2) + 2 * COLUMN + (i & 1)]
            old = np.where(kept, spread(read, threads, lanes), np.float32(0))
            write(threads, lanes, accumulated(old, part.reshape(-1)))

    return step


def _signs(operands: list[Operand]) -> tuple[int, list[bool]]:
    """Return the product of both signs, and which matrices in shared memory are transposed."""
    values = [operand.bits for operand in operands if isinstance(operand, Immediate)]
    return values[0] * values[1], [value == 1 for value in values[2:]]


def _left_in_registers(items: tuple[Operand, ...], kind: str) -> Fetch:
    read = gathered(items)
    return lambda threads, lanes: left_matrix(read(threads, lanes), kind).reshape(-1, 64, DEPTH)


def check_groups(threads: Threads, lanes: Lanes, what: Instruction) -> None:
    warps = threads.warps(lanes, what)
    if len(warps) % 4 or (warps[::4, 0] % GROUP).any() or (warps[3::4, 0] - warps[::4, 0] != GROUP - WARP).any():
        raise PtxError(f"a warp group is not together: {what}")


def build(instruction: Instruction) -> Step:
    if "mma_async" in instruction.parts:
        return multiply(instruction)
    return lambda threads, lanes: check_groups(threads, lanes, instruction)


BUILDERS: dict[str, Build] = {"wgmma": build}

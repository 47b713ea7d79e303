"""What the threads of a warp do together: shuffles, votes, reductions, and their own barrier."""

import numpy as np
from support.ptx.machine.threads import WARP, Lanes, Step, Threads
from support.ptx.opcodes.elementwise import Build
from support.ptx.scalars import PtxError
from support.ptx.source.operands import Operand, Pair
from support.ptx.source.program import Instruction
from support.ptx.values import reader, spread, writer

LANE = np.arange(WARP)
ALL = np.uint32(0xFFFFFFFF)
_REDUCTIONS = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def meet(mask: Operand, instruction: Instruction) -> Step:
    """Return what checks that whole warps are here, and that all their threads are named."""
    read = reader(mask, "b32")

    def step(threads: Threads, lanes: Lanes) -> None:
        threads.warps(lanes, instruction)
        if (read(threads, lanes) != ALL).any():
            raise PtxError(f"not supported: a part of a warp: {instruction}")

    return step


def warp_barrier(instruction: Instruction) -> Step:
    together = meet(instruction.operands[0], instruction)

    def step(threads: Threads, lanes: Lanes) -> None:
        together(threads, lanes)
        threads.clock.order_warps(threads.numbers(lanes))

    return step


def shuffle(instruction: Instruction) -> Step:
    """shfl: each thread gets another's value, or its own where there is no such thread in its segment."""
    mode = instruction.one_of("up", "down", "bfly", "idx")
    target, *inputs, mask = instruction.operands
    value, count, bounds = (reader(operand, "b32") for operand in inputs)
    targets = (target.first, target.second) if isinstance(target, Pair) else (target,)
    writes, together = [writer(each) for each in targets], meet(mask, instruction)

    def step(threads: Threads, lanes: Lanes) -> None:
        together(threads, lanes)
        values, counts, limits = (spread(read, threads, lanes).reshape(-1, WARP) for read in (value, count, bounds))
        other, inside = partners(mode, counts.astype(np.int64) & 31, limits.astype(np.int64))
        results = (np.take_along_axis(values, other, 1).reshape(-1), inside.reshape(-1))
        for write, result in zip(writes, results, strict=False):
            write(threads, lanes, result)

    return step


def partners(mode: str | None, counts: np.ndarray, limits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return whose value each lane gets, and whether that lane is in its segment; both [warps, 32]."""
    segment, clamp = limits >> 8 & 31, limits & 31
    first, last = LANE & segment, (LANE & segment) | (clamp & ~segment)
    found = {"up": LANE - counts, "down": LANE + counts, "bfly": LANE ^ counts}
    other = found[mode] if mode in found else first | (counts & ~segment)
    inside = other >= last if mode == "up" else other <= last
    return np.where(inside, other, LANE), inside


def reduce(instruction: Instruction) -> Step:
    """redux: the same result for all threads of a warp."""
    combine = _REDUCTIONS[instruction.one_of(*_REDUCTIONS)]
    target, value, mask = instruction.operands
    read, write, together = reader(value, instruction.kind), writer(target), meet(mask, instruction)

    def step(threads: Threads, lanes: Lanes) -> None:
        together(threads, lanes)
        values = spread(read, threads, lanes).reshape(-1, WARP)
        write(threads, lanes, np.repeat(combine.reduce(values, axis=1, dtype=values.dtype), WARP))

    return step


def vote(instruction: Instruction) -> Step:
    target, value, mask = instruction.operands
    read, write, together = reader(value, "pred"), writer(target), meet(mask, instruction)
    mode = instruction.one_of("ballot", "any", "all", "uni")

    def step(threads: Threads, lanes: Lanes) -> None:
        together(threads, lanes)
        votes = spread(read, threads, lanes).reshape(-1, WARP)
        results = {
            "ballot": (votes.astype(np.uint32) << LANE.astype(np.uint32)).sum(1, dtype=np.uint32),
            "any": votes.any(1),
            "all": votes.all(1),
            "uni": votes.all(1) | ~votes.any(1),
        }
        write(threads, lanes, np.repeat(results[mode], WARP))

    return step


BUILDERS: dict[str, Build] = {"bar": warp_barrier, "shfl": shuffle, "redux": reduce, "vote": vote}

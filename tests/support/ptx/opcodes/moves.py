"""Moves, choices and comparisons; and instructions that only advise the device."""

from collections.abc import Callable

import numpy as np
from support.ptx.machine.threads import Lanes, Step, Threads
from support.ptx.opcodes.elementwise import Build
from support.ptx.scalars import halves, is_float, is_pair, width
from support.ptx.source.operands import Pair
from support.ptx.source.program import Instruction
from support.ptx.values import reader, spread, writer

Compare = Callable[[np.ndarray, np.ndarray], np.ndarray]
_ORDERS: dict[str, Compare] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "lo": np.less,
    "le": np.less_equal,
    "ls": np.less_equal,
    "gt": np.greater,
    "hi": np.greater,
    "ge": np.greater_equal,
    "hs": np.greater_equal,
}
_JOINS = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def untyped(kind: str) -> str:
    """Return the type of the same bits without a meaning."""
    return kind if kind == "pred" else f"b{width(kind)}"


def move(instruction: Instruction) -> Step:
    """mov, cvta: a register, a constant, or several registers joined or parted."""
    kind = untyped(instruction.kind)
    read, write = reader(instruction.operands[1], kind), writer(instruction.operands[0])

    def step(threads: Threads, lanes: Lanes) -> None:
        write(threads, lanes, np.array(spread(read, threads, lanes)))

    return step


def select(instruction: Instruction) -> Step:
    kind = untyped(instruction.kind)
    target, first, second, predicate = instruction.operands
    reads, chosen, write = [reader(each, kind) for each in (first, second)], reader(predicate, "pred"), writer(target)

    def step(threads: Threads, lanes: Lanes) -> None:
        a, b = (spread(read, threads, lanes) for read in reads)
        write(threads, lanes, np.where(chosen(threads, lanes), a, b))

    return step


def comparison(name: str, kind: str) -> Compare:
    """Return the comparison of this name. Those that end with u hold for a NaN, the others do not."""
    if not is_float(kind):
        return _ORDERS[name]
    if name in ("num", "nan"):
        return lambda a, b: (np.isnan(a) | np.isnan(b)) == (name == "nan")
    order = _ORDERS[name[:2]]
    if name in ("ne", "neu"):
        return np.not_equal if name == "neu" else lambda a, b: (a != b) & ~np.isnan(a) & ~np.isnan(b)
    return order if name in _ORDERS else lambda a, b: order(a, b) | np.isnan(a) | np.isnan(b)


def set_predicate(instruction: Instruction) -> Step:
    """setp: a comparison; a second destination gets its opposite, or the comparison of the upper halves."""
    kind, modifiers = instruction.kind, instruction.modifiers
    compare = comparison(modifiers[0], kind.removesuffix("x2"))
    target = instruction.operands[0]
    writes = [writer(each) for each in ((target.first, target.second) if isinstance(target, Pair) else (target,))]
    reads = [reader(each, "b32" if is_pair(kind) else kind) for each in instruction.operands[1:3]]
    join = instruction.one_of(*_JOINS)
    other = reader(instruction.operands[3], "pred") if join else None

    def step(threads: Threads, lanes: Lanes) -> None:
        a, b = (spread(read, threads, lanes) for read in reads)
        if is_pair(kind):
            results = [compare(x, y) for x, y in zip(halves(a, kind), halves(b, kind), strict=True)]
        else:
            first = compare(a, b)
            results = [first, ~first]
        for write, result in zip(writes, results, strict=False):
            write(threads, lanes, _JOINS[join](result, other(threads, lanes)) if join else result)

    return step


def nothing(instruction: Instruction) -> Step:
    """Build what changes nothing here: prefetches, and fences between agents that this lockstep never parts."""
    return lambda threads, lanes: None


def policy(instruction: Instruction) -> Step:
    """createpolicy: how a cache may treat what is loaded; no load looks at it here."""
    write = writer(instruction.operands[0])
    return lambda threads, lanes: write(threads, lanes, np.zeros(threads.size(lanes), np.uint64))


def active_threads(instruction: Instruction) -> Step:
    write = writer(instruction.operands[0])

    def step(threads: Threads, lanes: Lanes) -> None:
        active = np.zeros(threads.count, np.uint32)
        active[lanes] = 1
        masks = (active.reshape(-1, 32) << np.arange(32, dtype=np.uint32)).sum(1, dtype=np.uint32)
        write(threads, lanes, np.repeat(masks, 32)[lanes])

    return step


BUILDERS: dict[str, Build] = {
    "mov": move,
    "cvta": move,
    "selp": select,
    "setp": set_predicate,
    "createpolicy": policy,
    "activemask": active_threads,
} | dict.fromkeys(("prefetch", "fence", "membar", "discard", "applypriority", "griddepcontrol", "nanosleep"), nothing)

"""Operands as functions: what reads a value in some threads, and what writes one."""

from collections.abc import Callable

import numpy as np
from support.ptx.machine.threads import Lanes, Threads
from support.ptx.scalars import SIGNED, UNSIGNED, PtxError, numbers, width
from support.ptx.source.operands import Immediate, Inverted, Operand, Register, Special, Unwanted, Vector

Read = Callable[[Threads, Lanes], np.ndarray]  # one value a thread, or one for all
Write = Callable[[Threads, Lanes, np.ndarray], None]


def reader(operand: Operand, kind: str) -> Read:
    """Return what reads an operand as numbers of a type."""
    if kind == "pred":
        return _predicate(operand)
    bits = _bits(operand, width(kind), extends=kind[0] in "bu")
    return lambda threads, lanes: numbers(bits(threads, lanes), kind)


def spread(read: Read, threads: Threads, lanes: Lanes) -> np.ndarray:
    """Read one value for each thread."""
    return np.broadcast_to(read(threads, lanes), (threads.size(lanes),))


def _predicate(operand: Operand) -> Read:
    match operand:
        case Register(name, 1):
            return lambda threads, lanes: threads.register(name)[lanes]
        case Immediate(bits):
            constant = np.array([bits != 0])
            return lambda threads, lanes: constant
        case Inverted(inner):
            read = _predicate(inner)
            return lambda threads, lanes: ~read(threads, lanes)
    raise PtxError(f"predicate expected, got {operand}")


def _bits(operand: Operand, bits: int, extends: bool) -> Read:
    """Return what reads an operand as unsigned integers; registers may be wider, and narrower ones are extended."""
    unsigned = UNSIGNED[bits]
    match operand:
        case Register(name, have) if have == bits:
            return lambda threads, lanes: threads.register(name)[lanes]
        case Register(name, have) if have > bits or extends and have > 1:
            return lambda threads, lanes: threads.register(name)[lanes].astype(unsigned)
        case Immediate(value):
            constant = np.array([value & (2**bits - 1)], unsigned)
            return lambda threads, lanes: constant
        case Special(name):
            return lambda threads, lanes: threads.special[name][lanes].astype(unsigned)
        case Vector(items):
            return _joined(items, bits)
    raise PtxError(f"{bits} bits expected, got {operand}")


def _joined(items: tuple[Operand, ...], bits: int) -> Read:
    """Return what reads several registers as one, the lowest bits first."""
    part = bits // len(items)
    reads = [_bits(item, part, extends=False) for item in items]
    unsigned = UNSIGNED[bits]

    def read(threads: Threads, lanes: Lanes) -> np.ndarray:
        words = [each(threads, lanes).astype(unsigned) << unsigned(part * i) for i, each in enumerate(reads)]
        return np.bitwise_or.reduce(np.broadcast_arrays(*words))

    return read


def writer(operand: Operand) -> Write:
    """Return what writes numbers to registers: signed ones are widened with their sign, all others with zeros."""
    match operand:
        case Unwanted():
            return lambda threads, lanes, values: None
        case Register(name, 1):
            return lambda threads, lanes, values: _put(threads, name, lanes, values)
        case Register(name, bits):
            return lambda threads, lanes, values: _put(threads, name, lanes, _widened(values, bits))
        case Vector(items):
            return _parted([writer(item) for item in items])
    raise PtxError(f"destination expected, got {operand}")


def _put(threads: Threads, name: str, lanes: Lanes, values: np.ndarray) -> None:
    if isinstance(lanes, slice) and len(values) == threads.count and values.flags.writeable:
        threads.registers[name] = values if values.base is None else values.copy()
    else:
        threads.register(name)[lanes] = values


def _widened(values: np.ndarray, bits: int) -> np.ndarray:
    have = 8 * values.dtype.itemsize
    if have == bits:
        return values.view(UNSIGNED[bits])
    if have < bits and values.dtype.kind == "i":
        return values.astype(SIGNED[bits]).view(UNSIGNED[bits])
    return values.view(UNSIGNED[have]).astype(UNSIGNED[bits])


def _parted(writes: list[Write]) -> Write:
    def write(threads: Threads, lanes: Lanes, values: np.ndarray) -> None:
        have = 8 * values.dtype.itemsize
        words, part = values.view(UNSIGNED[have]), have // len(writes)
        for i, each in enumerate(writes):
            each(threads, lanes, (words >> UNSIGNED[have](part * i)).astype(UNSIGNED[part]))

    return write

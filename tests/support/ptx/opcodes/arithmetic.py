"""Sums, products, quotients and extremes of integers and floating-point numbers."""

import numpy as np
from support.ptx.machine.threads import Lanes, Step, Threads
from support.ptx.opcodes.elementwise import Build, elementwise
from support.ptx.rounding import fused_f32
from support.ptx.scalars import PtxError, integer, is_float, width
from support.ptx.source.program import Instruction
from support.ptx.values import reader, writer


def add(instruction: Instruction, kind: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a + b


def subtract(instruction: Instruction, kind: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a - b


def negate(instruction: Instruction, kind: str, a: np.ndarray) -> np.ndarray:
    return -a if is_float(kind) else a.dtype.type(0) - a


def magnitude(instruction: Instruction, kind: str, a: np.ndarray) -> np.ndarray:
    return np.abs(a)


def multiply(instruction: Instruction, kind: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the product: the lower half of an integers', the upper with .hi, both with .wide."""
    if is_float(kind):
        return a * b
    if "wide" in instruction.parts:
        wide = integer(f"{kind[0]}{2 * width(kind)}")
        return a.astype(wide) * b.astype(wide)
    return _upper_half(kind, a, b) if "hi" in instruction.parts else a * b


def _upper_half(kind: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    bits = width(kind)
    if bits < 64:
        wide = integer(f"{kind[0]}{2 * bits}")
        return ((a.astype(wide) * b.astype(wide)) >> wide(bits)).astype(a.dtype)
    products = a.astype(object) * b.astype(object)
    return np.array([(int(product) >> 64) & (2**64 - 1) for product in products], np.uint64).view(a.dtype)


def fused(instruction: Instruction, kind: str, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    if kind == "f32":
        return fused_f32(*np.broadcast_arrays(a, b, c))
    if kind == "f64":
        return a * b + c
    total = a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)
    return total.astype(a.dtype)


def quotient(instruction: Instruction, kind: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if is_float(kind):
        return a / b
    a, b = np.broadcast_arrays(a, b)
    whole = np.where(b == 0, b.dtype.type(1), b)
    truncated = (a - np.fmod(a, whole)) // whole
    return np.where(b == 0, ~a.dtype.type(0), truncated).astype(a.dtype)


def remainder(instruction: Instruction, kind: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    a, b = np.broadcast_arrays(a, b)
    return np.where(b == 0, a, np.fmod(a, np.where(b == 0, b.dtype.type(1), b)))


def largest(instruction: Instruction, kind: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if not is_float(kind):
        return _at_least_zero(instruction, np.maximum(a, b))
    result = (np.maximum if "NaN" in instruction.parts else np.fmax)(a, b)
    return _signed_zeros(result, a, b, np.signbit(a) & np.signbit(b))


def smallest(instruction: Instruction, kind: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if not is_float(kind):
        return _at_least_zero(instruction, np.minimum(a, b))
    result = (np.minimum if "NaN" in instruction.parts else np.fmin)(a, b)
    return _signed_zeros(result, a, b, np.signbit(a) | np.signbit(b))


def _at_least_zero(instruction: Instruction, result: np.ndarray) -> np.ndarray:
    return np.maximum(result, 0) if "relu" in instruction.parts else result


def _signed_zeros(result: np.ndarray, a: np.ndarray, b: np.ndarray, is_negative: np.ndarray) -> np.ndarray:
    """Of zeros, the negative one is smaller."""
    zeros = np.where(is_negative, result.dtype.type(-0.0), result.dtype.type(0.0))
    return np.where((a == 0) & (b == 0), zeros, result)


def multiply_add(instruction: Instruction) -> Step:
    """mad: of integers, with .wide the addend and the result have twice the bits; of floats, as fma."""
    kind = instruction.kind
    if is_float(kind):
        return elementwise(fused, 3)(instruction)
    if "hi" in instruction.parts:
        raise PtxError("mad.hi")
    total = f"{kind[0]}{2 * width(kind)}" if "wide" in instruction.parts else kind
    write = writer(instruction.operands[0])
    reads = [reader(operand, each) for operand, each in zip(instruction.operands[1:], (kind, kind, total), strict=True)]

    def step(threads: Threads, lanes: Lanes) -> None:
        a, b, c = (read(threads, lanes) for read in reads)
        write(threads, lanes, multiply(instruction, kind, a, b) + c)

    return step


BUILDERS: dict[str, Build] = {
    "add": elementwise(add, 2),
    "sub": elementwise(subtract, 2),
    "neg": elementwise(negate, 1),
    "abs": elementwise(magnitude, 1),
    "mul": elementwise(multiply, 2),
    "fma": elementwise(fused, 3),
    "mad": multiply_add,
    "div": elementwise(quotient, 2),
    "rem": elementwise(remainder, 2),
    "max": elementwise(largest, 2),
    "min": elementwise(smallest, 2),
}

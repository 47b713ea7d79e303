"""cvt: numbers of one type to those of another."""

from collections.abc import Callable

import numpy as np
from support.ptx.machine.threads import Lanes, Step, Threads
from support.ptx.opcodes.elementwise import Build
from support.ptx.rounding import FP8, flushed, one_nan, to_bf16, to_bf16_by_cutting, to_f16, to_fp8
from support.ptx.scalars import FLOATS, integer, is_float, is_pair, packed, width
from support.ptx.source.program import Instruction
from support.ptx.values import Read, reader, writer

_TO_INTEGERS = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def convert(instruction: Instruction) -> Step:
    to, given = instruction.types
    if is_pair(to) and given == "f32":
        return _two_floats(instruction, _rounds_to_bf16(instruction) if to == "bf16x2" else to_f16)
    if to in ("e4m3x2", "e5m2x2"):
        return _two_fp8(instruction, to[:4], given)
    if given in ("e4m3x2", "e5m2x2"):
        return _from_two_fp8(instruction, FP8[given[:4]])
    if to == "bf16" and given == "f32":
        return _single(instruction, reader(instruction.operands[1], "f32"), _rounds_to_bf16(instruction))
    if to == "tf32":
        return _single(instruction, reader(instruction.operands[1], "b32"), _to_tf32)
    return _single(instruction, reader(instruction.operands[1], given), _function(instruction, to, given))


def _single(instruction: Instruction, read: Read, function: Callable[[np.ndarray], np.ndarray]) -> Step:
    write = writer(instruction.operands[0])
    return lambda threads, lanes: write(threads, lanes, function(read(threads, lanes)))


def _function(instruction: Instruction, to: str, given: str) -> Callable[[np.ndarray], np.ndarray]:
    whole = instruction.one_of(*_TO_INTEGERS)
    if is_float(to):
        rounds = _TO_INTEGERS[whole] if whole and is_float(given) else lambda numbers: numbers
        flushes = "ftz" in instruction.parts and to == "f32"
        return lambda numbers: _to_float(flushed(rounds(numbers)) if flushes else rounds(numbers), to)
    if is_float(given):
        return lambda numbers: _float_to_integer(_TO_INTEGERS[whole](numbers.astype(np.float64)), integer(to))
    return lambda numbers: _between_integers(numbers, integer(to), "sat" in instruction.parts)


def _to_float(numbers: np.ndarray, to: str) -> np.ndarray:
    """A NaN loses its sign and its payload, as in arithmetic."""
    if to == "bf16":
        return to_bf16(numbers.astype(np.float32))
    if to == "f16" and numbers.dtype.kind == "f":
        return to_f16(numbers)
    return one_nan(numbers.astype(FLOATS[width(to)]))


def _float_to_integer(whole: np.ndarray, dtype: type) -> np.ndarray:
    """Saturate; a NaN becomes zero."""
    least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
    inside = (whole > float(least)) & (whole < float(most))
    fit = np.where(inside, whole, 0).astype(np.int64 if least else np.uint64).astype(dtype)
    return np.where(whole >= float(most), dtype(most), np.where(whole <= float(least), dtype(least), fit))


def _between_integers(numbers: np.ndarray, dtype: type, saturates: bool) -> np.ndarray:
    if saturates:
        most = min(np.iinfo(dtype).max, np.iinfo(numbers.dtype).max)
        numbers = np.clip(numbers, max(np.iinfo(dtype).min, np.iinfo(numbers.dtype).min), most)
    return numbers.astype(dtype)


def _rounds_to_bf16(instruction: Instruction) -> Callable[[np.ndarray], np.ndarray]:
    return to_bf16_by_cutting if "rz" in instruction.parts else to_bf16


def _to_tf32(words: np.ndarray) -> np.ndarray:
    """Round to 10 bits of mantissa, halves away from zero."""
    rounded = (words + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    return np.where(np.isnan(words.view(np.float32)), words, rounded)


def _two_floats(instruction: Instruction, rounded: Callable[[np.ndarray], np.ndarray]) -> Step:
    """The first source becomes the upper half."""
    high, low = (reader(operand, "f32") for operand in instruction.operands[1:3])
    write, least = writer(instruction.operands[0]), np.float32(0) if "relu" in instruction.parts else None

    def step(threads: Threads, lanes: Lanes) -> None:
        both = [read(threads, lanes) for read in (low, high)]
        write(threads, lanes, packed(*(rounded(each if least is None else np.fmax(each, least)) for each in both)))

    return step


def _two_fp8(instruction: Instruction, kind: str, given: str) -> Step:
    write = writer(instruction.operands[0])
    pairs = given == "f16x2"
    reads = [reader(operand, "b32" if pairs else given) for operand in instruction.operands[1:]]

    def step(threads: Threads, lanes: Lanes) -> None:
        sources = [read(threads, lanes) for read in reads]
        if pairs:
            low, high = ((sources[0] >> np.uint32(shift)).astype(np.uint16).view(np.float16) for shift in (0, 16))
        else:
            high, low = sources
        codes = to_fp8(high, kind).astype(np.uint16) << np.uint16(8) | to_fp8(low, kind)
        write(threads, lanes, codes)

    return step


def _from_two_fp8(instruction: Instruction, table: np.ndarray) -> Step:
    read, write = reader(instruction.operands[1], "b16"), writer(instruction.operands[0])

    def step(threads: Threads, lanes: Lanes) -> None:
        codes = read(threads, lanes)
        write(threads, lanes, packed(*(to_f16(table[codes >> np.uint16(s) & np.uint16(255)]) for s in (0, 8))))

    return step


BUILDERS: dict[str, Build] = {"cvt": convert}

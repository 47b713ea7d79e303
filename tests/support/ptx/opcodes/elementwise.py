"""Instructions that make one number of some, in each thread for itself."""

from collections.abc import Callable

import numpy as np
from support.ptx.machine.threads import Lanes, Step, Threads
from support.ptx.rounding import flushed, one_nan, to_bf16, to_f16
from support.ptx.scalars import halves, is_float, is_pair, packed
from support.ptx.source.program import Instruction
from support.ptx.values import reader, writer

Function = Callable[..., np.ndarray]  # (instruction, kind, *numbers)
Build = Callable[[Instruction], Step]


def elementwise(function: Function, num_inputs: int) -> Build:
    """Return what builds the steps of an opcode, for single numbers and for pairs in one register."""

    def build(instruction: Instruction) -> Step:
        make = _pairs if is_pair(instruction.kind) else _singles
        return make(instruction, function, num_inputs)

    return build


def _singles(instruction: Instruction, function: Function, num_inputs: int) -> Step:
    kind, write = instruction.kind, writer(instruction.operands[0])
    reads = [reader(operand, kind) for operand in instruction.operands[1 : 1 + num_inputs]]

    def step(threads: Threads, lanes: Lanes) -> None:
        result = function(instruction, kind, *(read(threads, lanes) for read in reads))
        write(threads, lanes, finished(instruction, kind, result))

    return step


def finished(instruction: Instruction, kind: str, result: np.ndarray) -> np.ndarray:
    """Return what is written: with one NaN, flushed, saturated and rounded as the modifiers ask."""
    if not is_float(kind):
        return result
    if "ftz" in instruction.parts and kind == "f32":
        result = flushed(result)
    if "sat" in instruction.parts:
        result = np.clip(np.where(np.isnan(result), result.dtype.type(0), result), 0, 1).astype(result.dtype)
    return to_bf16(result) if kind == "bf16" else one_nan(result)


def _pairs(instruction: Instruction, function: Function, num_inputs: int) -> Step:
    pair, write = instruction.kind, writer(instruction.operands[0])
    kind = pair.removesuffix("x2")
    reads = [reader(operand, "b32") for operand in instruction.operands[1 : 1 + num_inputs]]
    rounded = to_bf16 if kind == "bf16" else to_f16

    def step(threads: Threads, lanes: Lanes) -> None:
        inputs = [halves(read(threads, lanes), pair) for read in reads]
        low, high = (rounded(function(instruction, kind, *part)) for part in zip(*inputs, strict=True))
        write(threads, lanes, packed(low, high))

    return step

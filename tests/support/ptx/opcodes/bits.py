"""Logic, shifts, and fields of bits."""

from collections.abc import Callable

import numpy as np
from support.ptx.machine.threads import Lanes, Step, Threads
from support.ptx.opcodes.elementwise import Build, elementwise
from support.ptx.scalars import UNSIGNED, PtxError, numbers, width
from support.ptx.source.operands import Immediate
from support.ptx.source.program import Instruction
from support.ptx.values import Read, reader, spread, writer

Apply = Callable[..., np.ndarray]


def logic(function: Apply, num_inputs: int) -> Build:
    """Return what builds steps of logic, on predicates or words."""

    def apply(instruction: Instruction, kind: str, *inputs: np.ndarray) -> np.ndarray:
        return function(*inputs)

    return elementwise(apply, num_inputs)


def mixed(apply: Apply, *others: str) -> Build:
    """Return what builds steps whose first input has the instruction's type, and the others these."""

    def build(instruction: Instruction) -> Step:
        kinds = [instruction.kind, *(each or instruction.kind for each in others)]
        inputs = instruction.operands[1 : 1 + len(kinds)]
        reads = [reader(operand, kind) for operand, kind in zip(inputs, kinds, strict=True)]
        return _written(instruction, reads, lambda *values: apply(instruction.kind, *values))

    return build


def _written(instruction: Instruction, reads: list[Read], apply: Apply) -> Step:
    write = writer(instruction.operands[0])

    def step(threads: Threads, lanes: Lanes) -> None:
        write(threads, lanes, apply(*(spread(read, threads, lanes) for read in reads)))

    return step


def shift_left(kind: str, a: np.ndarray, count: np.ndarray) -> np.ndarray:
    return np.left_shift(a, np.minimum(count, np.uint32(width(kind))).astype(a.dtype))


def shift_right(kind: str, a: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Zeros come in from above, or the sign of signed numbers."""
    return np.right_shift(a, np.minimum(count, np.uint32(width(kind))).astype(a.dtype))


def funnel(instruction: Instruction) -> Step:
    """shf: 32 bits of two registers side by side, from a place on."""
    clamps, left = "clamp" in instruction.parts, "l" in instruction.parts
    reads = [reader(operand, "u32") for operand in instruction.operands[1:4]]

    def apply(low: np.ndarray, high: np.ndarray, count: np.ndarray) -> np.ndarray:
        both = low.astype(np.uint64) | (high.astype(np.uint64) << np.uint64(32))
        count = np.minimum(count, 32) if clamps else count & np.uint32(31)
        count = (32 - count if left else count).astype(np.uint64)
        return (both >> count).astype(np.uint32)

    return _written(instruction, reads, apply)


def extract_field(kind: str, a: np.ndarray, start: np.ndarray, length: np.ndarray) -> np.ndarray:
    """bfe: a field moved down; a signed one keeps its sign."""
    bits = width(kind)
    start, length = ((each & np.uint32(255)).astype(np.int64) for each in (start, length))
    end = np.minimum(start + length, bits)
    up = np.clip(bits - end, 0, bits - 1).astype(a.dtype)
    down = np.clip(bits - end + start, 0, bits - 1).astype(a.dtype)
    if kind[0] == "u":
        return np.where((length == 0) | (start >= bits), a.dtype.type(0), (a << up) >> down)
    return np.where(length == 0, a.dtype.type(0), (a << up) >> down)


def insert_field(kind: str, a: np.ndarray, b: np.ndarray, start: np.ndarray, length: np.ndarray) -> np.ndarray:
    """bfi: b, with a's lowest bits in place of a field."""
    unsigned = UNSIGNED[width(kind)]
    start, length = start.astype(unsigned), np.minimum(length, width(kind)).astype(unsigned)
    mask = np.where(length >= width(kind), ~unsigned(0), (unsigned(1) << length) - unsigned(1)) << start
    return (b & ~mask) | ((a << start) & mask)


def table_logic(instruction: Instruction) -> Step:
    """lop3: any function of three bits, as a table of eight."""
    table = instruction.operands[4]
    if not isinstance(table, Immediate):
        raise PtxError("a table of lop3 must be a constant")
    reads = [reader(operand, "b32") for operand in instruction.operands[1:4]]

    def apply(*inputs: np.ndarray) -> np.ndarray:
        result = np.zeros_like(inputs[0])
        for case in (i for i in range(8) if table.bits >> i & 1):
            bits = [word if case >> (2 - i) & 1 else ~word for i, word in enumerate(inputs)]
            result |= np.bitwise_and.reduce(bits)
        return result

    return _written(instruction, reads, apply)


def count_ones(kind: str, a: np.ndarray) -> np.ndarray:
    return _as_bits(a).sum(1, dtype=np.uint32)


def leading_zeros(kind: str, a: np.ndarray) -> np.ndarray:
    ones = _as_bits(a)[:, ::-1]
    return np.where(ones.any(1), ones.argmax(1), width(kind)).astype(np.uint32)


def reversed_bits(kind: str, a: np.ndarray) -> np.ndarray:
    return np.packbits(_as_bits(a)[:, ::-1], axis=1, bitorder="little").view(a.dtype).reshape(-1)


def _as_bits(a: np.ndarray) -> np.ndarray:
    """Return [words, bits], the lowest bit first."""
    data = np.ascontiguousarray(a).view(np.uint8).reshape(len(a), a.dtype.itemsize)
    return np.unpackbits(data, axis=1, bitorder="little")


def permute_bytes(kind: str, a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """prmt: four bytes, each one of both registers', or its sign eight times."""
    data = np.stack([a, b], 1).view(np.uint8)
    result = np.zeros(len(a), np.uint32)
    for i in range(4):
        chosen = (selector >> np.uint32(4 * i)) & np.uint32(15)
        byte = np.take_along_axis(data, (chosen & np.uint32(7)).astype(np.int64)[:, None], 1)[:, 0]
        signs = numbers(byte, "s8") >> 7
        byte = np.where(chosen & np.uint32(8), signs.view(np.uint8), byte)
        result |= byte.astype(np.uint32) << np.uint32(8 * i)
    return result


BUILDERS: dict[str, Build] = {
    "and": logic(np.bitwise_and, 2),
    "or": logic(np.bitwise_or, 2),
    "xor": logic(np.bitwise_xor, 2),
    "not": logic(np.invert, 1),
    "shl": mixed(shift_left, "u32"),
    "shr": mixed(shift_right, "u32"),
    "shf": funnel,
    "bfe": mixed(extract_field, "u32", "u32"),
    "bfi": mixed(insert_field, "", "u32", "u32"),
    "lop3": table_logic,
    "popc": mixed(count_ones),
    "clz": mixed(leading_zeros),
    "brev": mixed(reversed_bits),
    "prmt": mixed(permute_bytes, "b32", "u32"),
}

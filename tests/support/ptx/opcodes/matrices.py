"""Matrices spread over the registers of a warp: ldmatrix, stmatrix and mma.

a fragment of 8 x 8 halves: thread 4r + c holds row r's elements 2c and 2c + 1

row 0    t0 t0 t1 t1 t2 t2 t3 t3
row 1    t4 t4 t5 t5 ...
"""

import numpy as np
from support.ptx.machine.threads import WARP, Lanes, Step, Threads
from support.ptx.opcodes.elementwise import Build
from support.ptx.opcodes.memory import address_reader
from support.ptx.rounding import FP8, one_nan
from support.ptx.scalars import PtxError, halves, packed
from support.ptx.source.operands import Operand, items_of
from support.ptx.source.program import Instruction
from support.ptx.values import Read, reader, spread, writer

ROW, COLUMN = np.arange(WARP) >> 2, np.arange(WARP) & 3
ELEMENTS = {"f16": 2, "bf16": 2, "tf32": 1, "s8": 4, "u8": 4, "e4m3": 4, "e5m2": 4}  # of a register


def load_matrices(instruction: Instruction) -> Step:
    """ldmatrix: rows of 16 bytes, whose addresses 8 threads hold for each fragment."""
    writes = [writer(item) for item in items_of(instruction.operands[0])]
    read, transposed = address_reader(instruction.operands[1], "shared"), "trans" in instruction.parts

    def step(threads: Threads, lanes: Lanes) -> None:
        rows = _rows(threads, lanes, read(threads, lanes), len(writes), instruction, stores=False)
        for fragment, write in enumerate(writes):
            at = rows[:, 8 * fragment : 8 * fragment + 8]
            write(threads, lanes, _fetched(threads, at, transposed).reshape(-1))

    return step


def store_matrices(instruction: Instruction) -> Step:
    reads = [reader(item, "b32") for item in items_of(instruction.operands[1])]
    address, transposed = address_reader(instruction.operands[0], "shared"), "trans" in instruction.parts

    def step(threads: Threads, lanes: Lanes) -> None:
        rows = _rows(threads, lanes, address(threads, lanes), len(reads), instruction, stores=True)
        for fragment, read in enumerate(reads):
            at = rows[:, 8 * fragment : 8 * fragment + 8]
            _stored(threads, at, spread(read, threads, lanes).reshape(-1, WARP), transposed)

    return step


def _rows(
    threads: Threads, lanes: Lanes, addresses: np.ndarray, count: int, instruction: Instruction, stores: bool
) -> np.ndarray:
    """Return [warps, 8 * count]: where the rows begin."""
    if "m8n8" not in instruction.parts or "b16" not in instruction.parts:
        raise PtxError(f"not supported: {instruction}")
    holders = threads.warps(lanes, instruction)[:, : 8 * count].reshape(-1)
    used = addresses.reshape(-1, WARP)[:, : 8 * count].reshape(-1)
    places = threads.shared_place(holders, used, 16, instruction)
    if threads.shared_log:
        touch = threads.shared_log.write if stores else threads.shared_log.read
        touch(places, threads.numbers(holders), 16, instruction)
    return places.reshape(-1, 8 * count)


def _fetched(threads: Threads, rows: np.ndarray, transposed: bool) -> np.ndarray:
    if not transposed:
        return threads.shared_words[4][rows[:, ROW] // 4 + COLUMN]
    words = threads.shared_words[2]
    return packed(*(words[rows[:, 2 * COLUMN + i] // 2 + ROW] for i in range(2)))


def _stored(threads: Threads, rows: np.ndarray, values: np.ndarray, transposed: bool) -> None:
    if not transposed:
        threads.shared_words[4][rows[:, ROW] // 4 + COLUMN] = values
        return
    for i in range(2):
        threads.shared_words[2][rows[:, 2 * COLUMN + i] // 2 + ROW] = (values >> np.uint32(16 * i)).astype(np.uint16)


def elements(registers: np.ndarray, kind: str) -> np.ndarray:
    """Return in fp64 what registers hold: [...] to [..., elements of one]."""
    if kind in ("f16", "bf16"):
        return np.stack(halves(registers, kind), -1).astype(np.float64)
    if kind == "tf32":
        return (registers & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)[..., None]
    codes = np.ascontiguousarray(registers).view(np.uint8).reshape(*registers.shape, 4)
    if kind in FP8:
        return FP8[kind][codes].astype(np.float64)
    return (codes.view(np.int8) if kind == "s8" else codes).astype(np.float64)


def gathered(operands: tuple[Operand, ...]) -> Read:
    """Return what reads registers as [warps, 32, registers]."""
    reads = [reader(operand, "b32") for operand in operands]

    def read(threads: Threads, lanes: Lanes) -> np.ndarray:
        return np.stack([spread(each, threads, lanes).reshape(-1, WARP) for each in reads], -1)

    return read


def left_matrix(registers: np.ndarray, kind: str) -> np.ndarray:
    """Return [warps, 16, columns] of [warps, 32, 2 or 4 registers]."""
    values, per = elements(registers, kind), ELEMENTS[kind]
    matrix = np.zeros((len(registers), 16, 2 * per * registers.shape[2]))
    for register in range(registers.shape[2]):
        for i in range(per):
            column = per * COLUMN + i + 4 * per * (register >> 1)
            matrix[:, ROW + 8 * (register & 1), column] = values[:, :, register, i]
    return matrix


def right_matrix(registers: np.ndarray, kind: str) -> np.ndarray:
    """Return [warps, rows, 8] of [warps, 32, 1 or 2 registers]."""
    values, per = elements(registers, kind), ELEMENTS[kind]
    matrix = np.zeros((len(registers), 4 * per * registers.shape[2], 8))
    for register in range(registers.shape[2]):
        for i in range(per):
            matrix[:, per * COLUMN + i + 4 * per * register, ROW] = values[:, :, register, i]
    return matrix


def multiply(instruction: Instruction) -> Step:
    """mma: [16, k] times [k, 8] plus [16, 8]; summed in fp64 and rounded once."""
    kinds = [part for part in instruction.parts if part in (*ELEMENTS, "f32", "s32")]
    total, left, right = kinds[0], kinds[1], kinds[2]
    if not any(part.startswith("m16n8k") for part in instruction.parts) or total not in ("f32", "s32"):
        raise PtxError(f"not supported: {instruction}")
    target, first, second, addend = instruction.operands
    writes = [writer(item) for item in items_of(target)]
    reads = [reader(item, total) for item in items_of(addend)]
    a, b = gathered(items_of(first)), gathered(items_of(second))

    def step(threads: Threads, lanes: Lanes) -> None:
        threads.warps(lanes, instruction)
        product = left_matrix(a(threads, lanes), left) @ right_matrix(b(threads, lanes), right)
        for i, value in enumerate([spread(read, threads, lanes) for read in reads]):
            part = product[:, ROW + 8 * (i >> 1), 2 * COLUMN + (i & 1)].reshape(-1)
            writes[i](threads, lanes, accumulated(value, part))

    return step


def accumulated(value: np.ndarray, product: np.ndarray) -> np.ndarray:
    """Return a sum in fp32 or int32."""
    if value.dtype == np.int32:
        return (value.astype(np.int64) + product.astype(np.int64)).astype(np.int32)
    return one_nan((value.astype(np.float64) + product).astype(np.float32))


BUILDERS: dict[str, Build] = {"ldmatrix": load_matrices, "stmatrix": store_matrices, "mma": multiply}

"""Loads, stores and atomics: of parameters, of global and of shared memory; and copies from one to the other."""

from collections.abc import Callable

import numpy as np
from support.ptx.machine.threads import Lanes, Step, Threads
from support.ptx.opcodes.elementwise import Build
from support.ptx.scalars import UNSIGNED, PtxError, numbers, width
from support.ptx.source.operands import Address, Immediate, Operand, Register, Unwanted, items_of
from support.ptx.source.program import Instruction
from support.ptx.values import Read, reader, spread, writer


def space_of(instruction: Instruction) -> str:
    """Return the memory that is meant: param, shared or global; what is named none of them is global."""
    spaces = [part.split("::")[0] for part in instruction.modifiers]
    return next((space for space in spaces if space in ("param", "shared", "local", "const")), "global")


def address_reader(operand: Operand, space: str) -> Read:
    """Return what reads an address: 64 bits, but for shared memory, where it may have 32."""
    assert isinstance(operand, Address)
    base = operand.base
    bits = 32 if space == "shared" and not (isinstance(base, Register) and base.bits == 64) else 64
    read, offset = reader(base, f"u{bits}"), UNSIGNED[bits](operand.offset & (2**bits - 1))
    return lambda threads, lanes: spread(read, threads, lanes) + offset


def load(instruction: Instruction) -> Step:
    kind = instruction.kind
    as_integer = kind if kind[0] == "s" else f"u{width(kind)}"
    writes = [writer(item) for item in items_of(instruction.operands[0])]
    fetch = _fetcher(instruction, len(writes))

    def step(threads: Threads, lanes: Lanes) -> None:
        for write, words in zip(writes, fetch(threads, lanes), strict=True):
            write(threads, lanes, numbers(words, as_integer))

    return step


def _fetcher(instruction: Instruction, count: int) -> Callable[[Threads, Lanes], list[np.ndarray]]:
    """Return what reads `count` words that lie side by side."""
    space, size = space_of(instruction), width(instruction.kind) // 8
    read = address_reader(instruction.operands[1], space)

    def fetch(threads: Threads, lanes: Lanes) -> list[np.ndarray]:
        addresses = read(threads, lanes)
        if space == "param":
            return _parameters(threads, addresses, size, count, instruction)
        words, places = places_of(threads, lanes, space, addresses, size * count, size, instruction)
        log = threads.shared_log if space == "shared" else threads.memory.log
        if log:
            log.read(places, threads.numbers(lanes), size * count, instruction)
        return [words[places // size + i] for i in range(count)]

    return fetch


def places_of(
    threads: Threads, lanes: Lanes, space: str, addresses: np.ndarray, num_bytes: int, size: int, what: Instruction
) -> tuple[np.ndarray, np.ndarray]:
    """Return a memory as words of `size` bytes, and where in it accesses of `num_bytes` begin, in bytes."""
    if space == "shared":
        return threads.shared_words[size], threads.shared_place(lanes, addresses, num_bytes, what)
    if space != "global":
        raise PtxError(f"not supported: memory of kind {space}: {what}")
    return threads.memory.words[size], threads.memory.place(addresses, num_bytes, what)


def _parameters(threads: Threads, addresses: np.ndarray, size: int, count: int, what: Instruction) -> list[np.ndarray]:
    places = addresses.astype(np.int64)
    if (places + size * count > threads.entry.parameter_bytes).any():
        raise PtxError(f"out of bounds: parameters have {threads.entry.parameter_bytes} bytes: {what}")
    rows = threads.parameters[places[:, None] + np.arange(size * count)]
    return list(rows.view(UNSIGNED[8 * size]).T)


def store(instruction: Instruction) -> Step:
    space, size = space_of(instruction), width(instruction.kind) // 8
    read = address_reader(instruction.operands[0], space)
    values = [reader(item, f"b{8 * size}") for item in items_of(instruction.operands[1])]
    num_bytes = size * len(values)

    def step(threads: Threads, lanes: Lanes) -> None:
        words, places = places_of(threads, lanes, space, read(threads, lanes), num_bytes, size, instruction)
        log = threads.shared_log if space == "shared" else threads.memory.log
        if log:
            log.write(places, threads.numbers(lanes), num_bytes, instruction)
        for i, value in enumerate(values):
            stored = value(threads, lanes)
            words[places // size + i] = stored
            if (words[places // size + i] != stored).any():
                raise PtxError(f"race: threads write different values to one place: {instruction}")

    return step


_ATOMICS: dict[str, Callable[[int, int], int]] = {
    "or": lambda a, b: a | b,
    "and": lambda a, b: a & b,
    "xor": lambda a, b: a ^ b,
    "add": lambda a, b: a + b,
    "min": min,
    "max": max,
    "exch": lambda a, b: b,
}


def atomic(instruction: Instruction) -> Step:
    """atom, red: one thread after the other. They race with nothing, as no plain access may meet them here."""
    kind, space = instruction.kind, space_of(instruction)
    name = instruction.one_of(*_ATOMICS)
    if name is None or kind[0] not in "bus":
        raise PtxError(f"not supported: {instruction}")
    size, combine = width(kind) // 8, _ATOMICS[name]
    target, where, given = (Unwanted(), *instruction.operands)[-3:]
    read, value, write = address_reader(where, space), reader(given, kind), writer(target)

    def step(threads: Threads, lanes: Lanes) -> None:
        words, places = places_of(threads, lanes, space, read(threads, lanes), size, size, instruction)
        memory, old = numbers(words, kind), np.empty(len(places), words.dtype)
        for i, (place, one) in enumerate(zip(places // size, spread(value, threads, lanes), strict=True)):
            old[i] = words[place]
            words[place] = combine(int(memory[place]), int(one)) & (2 ** (8 * size) - 1)
        write(threads, lanes, old)

    return step


def copy(instruction: Instruction) -> Step:
    """cp.async: a copy to shared memory, the end of a group of them, or the wait for groups."""
    parts, operands = instruction.parts, instruction.operands
    if parts[1] != "async" or "bulk" in parts:
        raise PtxError(f"not supported: {instruction}")
    if "commit_group" in parts:
        return lambda threads, lanes: threads.copies.commit(lanes)
    if "wait_group" in parts or "wait_all" in parts:
        num_left = operands[0].bits if operands else -1
        return lambda threads, lanes: threads.copies.wait(lanes, num_left)
    return _async_copy(instruction)


def _async_copy(instruction: Instruction) -> Step:
    operands, size = instruction.operands, instruction.operands[2]
    assert isinstance(size, Immediate)
    target, source = address_reader(operands[0], "shared"), address_reader(operands[1], "global")
    wanted = reader(operands[3] if len(operands) > 3 else size, "u32")

    def step(threads: Threads, lanes: Lanes) -> None:
        places = threads.shared_place(lanes, target(threads, lanes), size.bits, instruction)
        counts = spread(wanted, threads, lanes)
        threads.copies.issue(lanes, places, source(threads, lanes), size.bits, counts, instruction)

    return step


BUILDERS: dict[str, Build] = {"ld": load, "ldu": load, "st": store, "atom": atomic, "red": atomic, "cp": copy}

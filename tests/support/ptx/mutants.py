"""Mutants: an instruction changed as a mistake of a compiler or of a programmer would. A test should fail with each."""

from collections.abc import Iterator
from dataclasses import replace

from support.ptx.scalars import width
from support.ptx.source.operands import Address, Immediate, Operand, items_of
from support.ptx.source.program import Instruction

_ORDERED = ("sub", "div", "rem", "shl", "shr", "selp", "setp", "prmt", "bfi")  # what their inputs' order decides
_RENAMED = {"max": "min", "min": "max", "add": "sub", "and": "or", "or": "and"}
_REPLACED = {"lt": "le", "le": "lt", "gt": "ge", "ge": "gt", "eq": "ne", "ne": "eq", "rni": "rzi"}
_ACCESSES = ("ld", "st", "cp", "ldmatrix", "stmatrix")


def mutants_of(instruction: Instruction) -> Iterator[tuple[str, Instruction]]:
    """Return what is done to an instruction, and what becomes of it."""
    yield from _of_guard(instruction)
    yield from _of_operands(instruction)
    yield from _of_name(instruction)
    if instruction.opcode == "bar" and "sync" in instruction.parts:
        yield "dropped", replace(instruction, parts=("membar",), operands=(), text="membar")


def _of_guard(instruction: Instruction) -> Iterator[tuple[str, Instruction]]:
    guard = instruction.guard
    if guard is not None:
        yield "guard turned", replace(instruction, guard=replace(guard, wanted=not guard.wanted))
        if instruction.opcode != "bra":
            yield "guard dropped", replace(instruction, guard=None)


def _of_operands(instruction: Instruction) -> Iterator[tuple[str, Instruction]]:
    operands = instruction.operands
    is_symmetric = {"eq", "ne"} & set(instruction.parts) or len(operands) < 3 or operands[1] == operands[2]
    if instruction.opcode in _ORDERED and not is_symmetric:
        yield "inputs swapped", replace(instruction, operands=(operands[0], operands[2], operands[1], *operands[3:]))
    for i, operand in enumerate(operands):
        moved = _moved(instruction, operand)
        if moved is not None:
            yield "off by one", replace(instruction, operands=(*operands[:i], moved, *operands[i + 1 :]))


def _moved(instruction: Instruction, operand: Operand) -> Operand | None:
    """Return an address one access farther, or a constant that is one more."""
    if isinstance(operand, Address) and instruction.opcode in _ACCESSES and "param" not in instruction.parts:
        return replace(operand, offset=operand.offset + _size(instruction))
    if isinstance(operand, Immediate) and (
        instruction.opcode in ("add", "shl", "shr", "and", "setp") or "wait_group" in instruction.parts
    ):
        return Immediate(operand.bits + 1)
    return None


def _size(instruction: Instruction) -> int:
    if instruction.opcode not in ("ld", "st"):
        return 16
    items = max(len(items_of(operand)) for operand in instruction.operands)
    return items * width(instruction.kind) // 8


def _of_name(instruction: Instruction) -> Iterator[tuple[str, Instruction]]:
    opcode, rest = instruction.opcode, instruction.parts[1:]
    if opcode in _RENAMED:
        yield "another opcode", replace(instruction, parts=(_RENAMED[opcode], *rest))
    if opcode == "setp" and rest[0] in _REPLACED:
        yield "another comparison", replace(instruction, parts=(opcode, _REPLACED[rest[0]], *rest[1:]))
    if opcode == "cvt" and "rn" in rest and rest[-1] == "f32" and "bf16" in rest[-2]:
        yield "another rounding", replace(instruction, parts=(opcode, "rz", *rest[1:]))
    if opcode == "cvt" and "rni" in rest:
        yield "another rounding", replace(instruction, parts=(opcode, "rzi", *rest[1:]))

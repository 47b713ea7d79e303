"""All opcodes, by name."""

from support.ptx.machine.threads import Step
from support.ptx.opcodes import (
    arithmetic,
    bits,
    conversions,
    functions,
    matrices,
    memory,
    moves,
    warp_groups,
    warps,
)
from support.ptx.opcodes.elementwise import Build
from support.ptx.scalars import PtxError
from support.ptx.source.program import Instruction

FAMILIES = (arithmetic, bits, conversions, functions, matrices, memory, moves, warp_groups, warps)
BUILDERS: dict[str, Build] = {name: build for family in FAMILIES for name, build in family.BUILDERS.items()}


def build(instruction: Instruction) -> Step:
    """Return what the instruction does to some threads.

    Raises:
        PtxError: it is not known.
    """
    if instruction.opcode not in BUILDERS:
        raise PtxError(f"not supported: {instruction}")
    return BUILDERS[instruction.opcode](instruction)

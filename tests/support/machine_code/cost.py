"""Cost: what a tile takes of a multiprocessor, as far as machine code shows it."""

import re
from dataclasses import dataclass

REGISTERS, MOST_WARPS, MOST_BLOCKS = 65536, 64, 32  # of a multiprocessor
SHARED = {80: 164 * 1024, 90: 228 * 1024}
RESERVED_SHARED = 1024  # of each thread block
_ALU = re.compile(
    r"^(?:@!?U?P\w+\s+)?(?:LOP3|IADD3|SHF|ISETP|FSETP|SEL|FSEL|PRMT|FMNMX|LEA|IMNMX|VIADD|VIMNMX|PLOP3|IABS|HSETP2"
    r"|HMNMX2|VABSDIFF|BMSK|SGXT|I2IP)\b"
)


@dataclass(frozen=True, slots=True)
class Cost:
    """instructions: of a warp for a tile. alu: those of them that take the pipe of integers, logic and comparisons.

    warps: that a multiprocessor holds at once, as registers and shared memory allow.
    """

    instructions: int
    alu: int
    registers: int
    shared: int
    warps: int

    @staticmethod
    def of(code: list[str], registers: int, shared: int, num_warps: int, arch: int) -> "Cost":
        alu = sum(bool(_ALU.match(line)) for line in code)
        num_instructions = sum(not line.startswith("NOP") for line in code)
        return Cost(num_instructions, alu, registers, shared, occupancy(registers, shared, num_warps, arch))


def occupancy(registers: int, shared: int, num_warps: int, arch: int) -> int:
    """Return how many warps of such thread blocks a multiprocessor holds at once."""
    of_a_warp = -(-registers * 32 // 256) * 256
    by_registers = REGISTERS // of_a_warp // num_warps
    by_shared = SHARED[arch] // (shared + RESERVED_SHARED)
    return min(by_registers, by_shared, MOST_WARPS // num_warps, MOST_BLOCKS) * num_warps

"""Machine code of a compiled kernel, as cuobjdump prints it: the instructions that a tile takes."""

import re
from dataclasses import dataclass

from support.sass import instructions, loops, printed

_LINE = re.compile(r"/\*([0-9a-f]{4,5})\*/\s+([^;]*);")


@dataclass(frozen=True, slots=True)
class MachineCode:
    """text: as printed. registers: of a thread. stack: bytes of a thread."""

    text: str
    registers: int
    stack: int

    @staticmethod
    def of(cubin: bytes, name: str = "") -> "MachineCode":
        """Read the only function, or the one whose name contains this."""
        code, usage = (printed(cubin, option) for option in ("-sass", "-res-usage"))
        _, *functions = re.split(r"\bFunction : ", code)
        (text,) = [function for function in functions if name in function.split("\n", 1)[0]]
        full = text.split("\n", 1)[0].strip()
        found = re.search(rf"Function {re.escape(full)}:\s+REG:(\d+) STACK:(\d+)", usage)
        assert found is not None, usage
        return MachineCode(text, int(found[1]), int(found[2]))

    def path(self) -> list[str]:
        """Return all up to the end of the kernel, without the subroutines after it."""
        lines = [(int(address, 16), line.strip()) for address, line in _LINE.findall(self.text)]
        calls = [address for address, line in lines if "CALL.REL" in line]
        ends = [address for address, line in lines if line == "EXIT"]
        last = min(end for end in ends if not calls or end > min(calls))
        return [line for address, line in lines if address <= last]

    def loop(self, wanted: str) -> list[str]:
        """Return the shortest innermost loop that has such an instruction.

        Raises:
            ValueError: there is none.
        """
        bodies = loops(instructions(self.text), wanted)
        if not bodies:
            raise ValueError(f"a loop must have {wanted}, got none")
        return [each.text for each in min(bodies, key=len)]

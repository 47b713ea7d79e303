"""Machine code of a compiled kernel, as cuobjdump prints it: the instructions that a tile takes."""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

_LINE = re.compile(r"/\*([0-9a-f]{4,5})\*/\s+([^;]*);")
_JUMP = re.compile(r"BRA(?:\.\w+)*\s+(?:!?U?P\w+,\s*)*(?:`\()?0x([0-9a-f]+)")


@dataclass(frozen=True, slots=True)
class Sass:
    """lines: addresses and instructions, in order. registers: of a thread. stack: bytes of a thread."""

    lines: tuple[tuple[int, str], ...]
    registers: int
    stack: int

    @staticmethod
    def of(cubin: bytes, cuobjdump: Path, name: str = "") -> "Sass":
        """Read the only function, or the one whose name contains this."""
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(cubin)
            file.flush()
            code, usage = (_output(cuobjdump, option, file.name) for option in ("-sass", "-res-usage"))
        _, *functions = re.split(r"\bFunction : ", code)
        (text,) = [function for function in functions if name in function.split("\n", 1)[0]]
        full = text.split("\n", 1)[0].strip()
        registers, stack = re.search(rf"Function {re.escape(full)}:\s+REG:(\d+) STACK:(\d+)", usage).groups()
        lines = tuple((int(address, 16), line.strip()) for address, line in _LINE.findall(text))
        return Sass(lines, int(registers), int(stack))

    def path(self) -> list[str]:
        """Return all up to the end of the kernel, without the subroutines after it."""
        calls = [address for address, line in self.lines if "CALL.REL" in line]
        ends = [address for address, line in self.lines if re.fullmatch(r"EXIT", line)]
        last = min(end for end in ends if not calls or end > min(calls))
        return [line for address, line in self.lines if address <= last]

    def loop(self, *wanted: str) -> list[str]:
        """Return the shortest loop that has all these instructions.

        Raises:
            ValueError: there is none.
        """
        bodies = []
        for address, line in self.lines:
            jump = _JUMP.search(line)
            if jump and int(jump[1], 16) < address:
                body = [each for at, each in self.lines if int(jump[1], 16) <= at <= address]
                if all(any(name in each for each in body) for name in wanted):
                    bodies.append(body)
        if not bodies:
            raise ValueError(f"a loop must have {wanted}, got none")
        return min(bodies, key=len)


def _output(tool: Path, option: str, path: str) -> str:
    return subprocess.run([tool, option, path], check=True, capture_output=True, text=True).stdout

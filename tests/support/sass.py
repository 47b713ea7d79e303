"""Machine code of NVIDIA's GPUs, as cuobjdump prints it: its instructions, and its loops."""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import triton

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class Instruction(NamedTuple):
    """address: in bytes. text: without predicate, e.g. "LDG.E R2, desc[UR4][R2.64]"."""

    address: int
    text: str

    @property
    def name(self):
        return self.text.split()[0].split(".")[0]

    @property
    def target(self):
        """The address that it branches to; None for any other."""
        found = re.search(r"0x([0-9a-f]+)", self.text) if self.name == "BRA" else None
        return None if found is None else int(found[1], 16)


def printed(cubin, option):
    """What cuobjdump prints of the machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([CUOBJDUMP, option, file.name], check=True, capture_output=True, text=True).stdout


def stack_of(compiled):
    """Bytes of a thread that registers are stored to. Local arrays are an error."""
    usage = printed(compiled.asm["cubin"], "-res-usage")
    assert re.search(r"LOCAL:0\b", usage), usage
    return max(map(int, re.findall(r"STACK:(\d+)", usage)))


def instructions(sass):
    lines = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?(.*?)\s*;", sass, re.MULTILINE)
    return [Instruction(int(address, 16), text) for address, text in lines]


def loops(code, wanted):
    """The innermost loops that have an instruction of a name that matches `wanted`."""
    bodies = [
        [each for each in code if last.target <= each.address <= last.address]
        for last in code
        if last.target is not None and last.target < last.address
    ]
    bodies = [body for body in bodies if any(re.fullmatch(wanted, each.name) for each in body)]
    return [body for body in bodies if not any(contains(body, other) for other in bodies)]


def contains(body, other):
    """Whether `other` is a shorter loop inside."""
    return len(other) < len(body) and body[0].address <= other[0].address and other[-1].address <= body[-1].address

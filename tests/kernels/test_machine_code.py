"""Machine code of each kernel against the table in docs/notes/machine_code.md: a tile that gets dearer is seen here."""

import os
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter replaces the compiler", allow_module_level=True)

from support.machine_code.cases import ARCHS, CASES  # noqa: E402
from support.machine_code.cost import Cost, occupancy  # noqa: E402
from support.machine_code.machine_code import MachineCode  # noqa: E402
from support.machine_code.table import read_table, text_of  # noqa: E402
from support.sass import CUOBJDUMP  # noqa: E402

VERSION, TABLE = read_table((Path(__file__).parents[2] / "docs" / "notes" / "machine_code.md").read_text())
TOLERANCE = 0.05
WRITE = "python tests/support/machine_code/table.py --write docs/notes/machine_code.md"


def test_the_table_has_all_cases():
    assert set(TABLE) == {(name, arch) for name in CASES for arch in ARCHS}, f"write it with {WRITE}"


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", CASES)
def test_a_tile_takes_what_the_table_says(name, arch):
    """Fewer is a reason to write the table anew, too."""
    if triton.__version__ != VERSION:
        pytest.skip(f"the table is of Triton {VERSION}, this is {triton.__version__}")
    if not CASES[name].can_run:
        pytest.skip(f"needs {CASES[name].program}")
    if not CUOBJDUMP.exists():
        pytest.skip("needs cuobjdump")
    got, want = CASES[name].measure(arch), TABLE[name, arch]
    for part in ("instructions", "alu", "registers", "shared"):
        one, other = getattr(got, part), getattr(want, part)
        assert abs(one - other) <= TOLERANCE * other + 2, f"{part}: {one}, but {other} in the table: {WRITE}"
    assert got.warps >= want.warps, f"a multiprocessor holds fewer warps: {WRITE}"


@pytest.mark.parametrize(
    "registers, shared, num_warps, arch, warps",
    [(32, 0, 8, 90, 64), (40, 0, 4, 80, 48), (168, 39424, 4, 90, 12), (255, 0, 8, 80, 8), (64, 100_000, 4, 80, 4)],
)
def test_occupancy(registers, shared, num_warps, arch, warps):
    assert occupancy(registers, shared, num_warps, arch) == warps


LINES = [
    "S2R R0, SR_TID.X",
    "LDG.E R2",
    "HMMA R4",
    "@P0 BRA 0x10",
    "HMMA R4",
    "STG.E R2",
    "@!P1 BRA 0x0",
    "EXIT",
    "NOP",
]


def test_a_loop_and_the_path_to_the_end():
    found = MachineCode("\n".join(f"  /*{16 * i:04x}*/  {line} ;" for i, line in enumerate(LINES)), 32, 0)
    assert found.loop("HMMA") == ["LDG.E R2", "HMMA R4", "BRA 0x10"] and found.path() == LINES[:8]
    with pytest.raises(ValueError, match="a loop must have"):
        found.loop("HGMMA")
    assert Cost.of(["LOP3.LUT R1", "@!P0 IADD3 R2", "NOP", "LDG R3"], 32, 0, 4, 90) == Cost(3, 2, 32, 0, 64)


def test_a_table_is_read_as_it_was_written():
    costs = {(name, arch): Cost(1234, 7, 40, 2048 + arch, 48) for name in CASES for arch in ARCHS}
    assert read_table(f"before\n{text_of(costs)}\nafter") == (triton.__version__, costs)

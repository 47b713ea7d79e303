"""python tests/support/machine_code/table.py [--write docs/notes/machine_code.md]: instructions, registers and
warps of each kernel, from the machine code that is compiled for sm_80 and sm_90.
"""

import argparse
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import triton  # noqa: E402
from support.machine_code.cases import ARCHS, CASES  # noqa: E402
from support.machine_code.cost import Cost  # noqa: E402

BEGIN, END = "<!-- machine code: triton {} -->", "<!-- end of machine code -->"
HEAD = ("Kernel", "For each", "Capability", "Instructions", "of the ALU", "Registers", "Shared bytes", "Warps")
Rows = dict[tuple[str, int], Cost]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the table into this page")
    options = parser.parse_args()
    text = text_of({(name, arch): CASES[name].measure(arch) for name in CASES for arch in ARCHS})
    print(text)
    if options.write:
        page = options.write.read_text()
        options.write.write_text(re.sub(BEGIN.format(".*?") + ".*?" + END, lambda _: text, page, flags=re.S))


def text_of(costs: Rows) -> str:
    """Return the table, with the version of Triton that compiled."""
    lines = ["| " + " | ".join(HEAD) + " |", "|---|---|" + "---:|" * (len(HEAD) - 2)]
    for (name, arch), cost in costs.items():
        numbers = (cost.instructions, cost.alu, cost.registers, cost.shared, cost.warps)
        lines.append(f"| {name} | {CASES[name].unit} | {arch / 10} | " + " | ".join(map("{:,}".format, numbers)) + " |")
    return "\n".join([BEGIN.format(triton.__version__), "", *lines, "", END])


def read_table(page: str) -> tuple[str, Rows]:
    """Return the version of Triton, and the rows."""
    found = re.search(BEGIN.format("(.*?)") + "(.*?)" + END, page, re.S)
    assert found is not None, "the page must have the table of machine code"
    costs: Rows = {}
    for line in found[2].strip().splitlines()[2:]:
        name, _, arch, *numbers = (cell.strip() for cell in line.strip("|").split("|"))
        costs[name, round(10 * float(arch))] = Cost(*(int(number.replace(",", "")) for number in numbers))
    return found[1], costs


if __name__ == "__main__":
    main()

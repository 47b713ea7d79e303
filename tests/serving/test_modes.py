"""docs/modes.md says for every mode and kind of model whether it works. Each cell is tried."""

import re
from pathlib import Path

import pytest
from support.mode_table import KINDS, MODES, YES, cell

PAGE = Path(__file__).parents[2] / "docs" / "modes.md"


def told() -> dict[tuple[str, str], str]:
    """Return the page's cells: "yes", or the reason of a refusal."""
    text = PAGE.read_text()
    reasons = dict(re.findall(r"^(\d+)\. (.*)$", text, re.MULTILINE))
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in text.splitlines() if line.startswith("| ")}
    cells = {}
    for mode in MODES:
        _, *marks = rows[mode].removesuffix(" |").split(" | ")
        for kind, mark in zip(KINDS, marks, strict=True):
            cells[mode, kind] = YES if mark == YES else reasons[mark.removeprefix("no (").removesuffix(")")]
    return cells


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
def test_a_cell_is_as_the_page_says(mode: str, kind: str) -> None:
    assert cell(mode, kind) == told()[mode, kind]


def test_at_most_one_cell_in_ten_is_refused() -> None:
    cells = told()
    refused = [cell for cell, text in cells.items() if text != YES]
    assert 10 * len(refused) <= len(cells), refused
    assert f"{len(cells) - len(refused)} of {len(cells)} cells work" in PAGE.read_text()

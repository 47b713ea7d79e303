"""The pages' tables, made of results by the templates of tables.md. No number is written by hand."""

import re
from collections import ChainMap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpage.benchmarks.cells import Row, fill_known
from kvpage.benchmarks.paths import value_at
from kvpage.benchmarks.runs import RUNS

Results = Mapping[str, Row]
"""The line of JSON of each run, by name."""
TEMPLATES = "benchmarks/tables.md"
SECTION = re.compile(r"## (\S+): (.+)\n\n((?:\|.*\n)+)")
DITTO = '"'
MAX_ROUNDING = 0.25
"""Of logits around 4 in bf16, for results that do not say it."""


@dataclass(frozen=True, slots=True)
class Line:
    """The template of a row, or of several.

    Args:
        cells: Templates of its cells.
        run: Whose result has the values.
        place: The path of its values in the result; with [] at the end of a list, each of which has a row.
    """

    cells: list[str]
    run: str
    place: str

    def rows(self, result: Row) -> Iterator[list[str]]:
        """Yield the cells of each row."""
        place = self.place.removesuffix("[]")
        found: Any = value_at(result, place) if place else result
        for values in found if place != self.place else [found]:
            fields = ChainMap(derived(values, result), values, result)
            yield [template and (fill_known(template, fields) or "not run") for template in self.cells]


@dataclass(frozen=True, slots=True)
class Template:
    """A table to be. titles: of its columns. lines: in their order."""

    titles: list[str]
    lines: list[Line]

    def table(self, results: Results) -> str:
        """Return the table of those rows whose run has a result; with a column "command" also the commands."""
        rows: list[list[str]] = []
        last = ""
        for line in (line for line in self.lines if line.run in results):
            for cells in line.rows(results[line.run]):
                command = [] if self.titles[-1] != "command" else ["" if line.run == last else shell(line.run)]
                rows.append([*cells, *command])
                last = line.run
        if not rows:
            return "Not measured yet."
        titles = [fill_known(title, results[last]) for title in self.titles]
        return "\n".join(_bars(cells) for cells in (titles, ["---"] * len(titles), *rows)).replace("| --- ", "|---")


def _bars(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def shell(run: str) -> str:
    """Return the words of a run's command."""
    return f"`python {' '.join(RUNS[run].arguments)}`"


def read_templates(root: Path) -> dict[tuple[str, str], Template]:
    """Return the templates of a source tree by their page and their name."""
    sections = SECTION.findall((root / TEMPLATES).read_text())
    return {(page, name): _template(rows.splitlines()) for page, name, rows in sections}


def _template(lines: list[str]) -> Template:
    """The last column of the rows is the run and the place. It is not in the table, where commands are instead."""
    titles, _, *rows = (line.strip("| ").split(" | ") if line.startswith("| ") else [] for line in lines)
    above, made = rows[0], []
    for row in rows:
        above = [old if new == DITTO else new for old, new in zip(above, row, strict=True)]
        run, _, place = above[-1].partition(" ")
        made.append(Line([cell.strip() for cell in above[:-1]], run, place))
    return Template(titles if titles[-1] == "command" else titles[:-1], made)


def derived(row: Row, result: Row) -> Row:
    """Return what cells show that a row does not have: words for wrong tokens, shares, the least time."""
    found: Row = {}
    if "tokens_per_s" in row:
        wrong = row.get("wrong", ())
        found["wrong"] = {name: ", wrong tokens" if name in wrong else "" for name in row["tokens_per_s"]}
        gap = row.get("max_gap", {}).get("vllm", 0.0)
        is_wrong = gap > row.get("max_rounding", MAX_ROUNDING)
        found["error"] = f", and whose tokens lie up to {gap:.2f} below the best logit" if is_wrong else ""
    if "ceiling" in row:
        found["least"] = value_at(result, "speed[method=full].seconds").median / row["ceiling"]
    if "parts us" in row and "us" in row:
        found["shares"] = {name: 100 * part.median / row["us"].median for name, part in row["parts us"].items()}
    return found

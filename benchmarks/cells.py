"""Cells of tables as templates over rows, such as "{GB/s:.1f} GB/s": one way for terminals and for pages."""

import re
import string
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvpage.benchmarks.figure import Figure
from kvpage.benchmarks.paths import value_at

Row = dict[str, Any]
FIELD = re.compile(r"(.*?)(?:([*/])(\d+))?")
SPEC = re.compile(r"([<>]?)(\d*)(.*)")
WORDS = {None: "-", True: "met", False: "MISSED"}


class Cells(string.Formatter):
    """Formats of rows. A field is a path (paths.py); * or / with a number may follow.

    Three numbers are a figure: a mean, and the ends of its interval. None is "-", True "met", False "MISSED". Of
    several figures the least and the largest median are shown.
    """

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return a field's value, and its name."""
        match = FIELD.fullmatch(field_name)
        assert match is not None
        path, sign, number = match.groups()
        value = value_at(kwargs, path)
        if isinstance(value, Sequence) and len(value) == 3 and all(isinstance(one, float) for one in value):
            mean, low, high = value
            value = Figure(mean, low, high, 1)
        if sign and value is not None:
            value = value * (float(number) if sign == "*" else 1 / float(number))
        return value, path

    def format_field(self, value: Any, format_spec: str) -> str:
        """Return the text of a value, in its width."""
        align, width, spec = _parts(format_spec)
        return f"{_text(value, spec):{align}{width}}"


def _parts(format_spec: str) -> tuple[str, str, str]:
    """Return the alignment, the width, and what a number's or a figure's own format takes."""
    match = SPEC.fullmatch(format_spec)
    assert match is not None
    align, width, spec = match.groups()
    return align or ">", width, spec


def _text(value: Any, spec: str) -> str:
    if value is None or isinstance(value, bool):
        return WORDS[value]
    if isinstance(value, list):
        medians = sorted(figure.median for figure in value)
        return f"{medians[0]:{spec}} to {medians[-1]:{spec}}"
    return format(value, "" if isinstance(value, str) else spec)


def fill(template: str, row: Mapping[str, Any]) -> str:
    """Return a template with the values of a row."""
    return Cells().vformat(template, (), row)


def fill_known(template: str, row: Mapping[str, Any]) -> str:
    """Return the parts of a template, which "; " separates, without those that ask for what the row lacks."""
    parts = [part for part in template.split("; ") if part and _is_known(part, row)]
    return "; ".join(fill(part, row) for part in parts)


def _is_known(part: str, row: Mapping[str, Any]) -> bool:
    cells = Cells()
    return all(name is None or cells.get_field(name, (), row)[0] is not None for _, name, _, _ in cells.parse(part))


def head(template: str) -> str:
    """Return the titles of a table, each in its column's width: the names of the fields, without .median."""
    parts = []
    for literal, name, spec, _ in string.Formatter().parse(template):
        align, width, _ = _parts(spec or "")
        title = (name or "").partition(".")[0]
        parts.append(literal + ("" if name is None else f"{title:{align}{width}}"))
    return "".join(parts)


def shown(template: str, rows: Iterable[Row]) -> list[Row]:
    """Print a table on a terminal, row by row as they come, and return them.

    Args:
        template: Of a row. Its fields have widths; their names are the titles.
        rows: With the values of the fields.
    """
    found: list[Row] = []
    for row in rows:
        if not found:
            print(head(template))
        print(fill(template, row), flush=True)
        found.append(row)
    return found


def with_figures(value: dict[str, Any]) -> Any:
    """Return the figure that a JSON object is, or the object: the `object_hook` of json.loads."""
    return Figure(**value) if value.keys() == {"median", "low", "high", "num"} else value

"""Cells of tables as templates over rows, such as "{GB/s:.1f} GB/s": one way for terminals and for pages."""

import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

from kvpage.benchmarks.figure import Figure

FIELD = re.compile(r"(.*?)(?:([*/])(\d+))?")
SPEC = re.compile(r"([<>]?)(\d*)(.*)")
WORDS = {None: "-", True: "met", False: "MISSED"}


class Cells(string.Formatter):
    """Formats of rows. A field is a key of the row; [key], .name, and * or / with a number may follow.

    A value that the row lacks, or None, is "-". True is "met", False "MISSED". Of several figures the least and the
    largest median are shown.
    """

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return a field's value, which is None where the row lacks it, and its first key."""
        match = FIELD.fullmatch(field_name)
        assert match is not None
        name, sign, number = match.groups()
        try:
            value, key = super().get_field(name, args, kwargs)
        except (KeyError, TypeError):  # TypeError: a key of None
            return None, name
        if sign and value is not None:
            value = value * (float(number) if sign == "*" else 1 / float(number))
        return value, key

    def get_value(self, key: int | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the value of a key, also of a number's name."""
        return kwargs[str(key)]

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


class Table:
    """A table on a terminal, row by row. template: of a row, whose fields have widths; their names are the titles."""

    def __init__(self, template: str) -> None:
        self._template, self._is_begun = template, False

    def head(self) -> str:
        """Return the titles, each in its column's width: the names of the fields, without .median."""
        parts = []
        for literal, name, spec, _ in string.Formatter().parse(self._template):
            align, width, _ = _parts(spec or "")
            title = (name or "").partition(".")[0]
            parts.append(literal + ("" if name is None else f"{title:{align}{width}}"))
        return "".join(parts)

    def show(self, row: Mapping[str, Any]) -> None:
        """Print a row; before the first one, the titles."""
        if not self._is_begun:
            self._is_begun = True
            print(self.head())
        print(fill(self._template, row), flush=True)


def show_all(template: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a table of rows."""
    table = Table(template)
    for row in rows:
        table.show(row)


def markdown(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of a page."""
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(cells)} |" for cells in rows)])


def with_figures(value: dict[str, Any]) -> Any:
    """Return the figure that a JSON object is, or the object: the `object_hook` of json.loads."""
    return Figure(**value) if value.keys() == {"median", "low", "high", "num"} else value

"""Pictures of benchmarks: bars, curves and stacked parts, of medians with their quartiles.

All draw into a file, `path`. `label` is of the axis of the values, `lines` are values to mark there, other options are
as of Axes.set.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvpage.benchmarks.figure import Figure

Row = Mapping[str, Any]
Value = Figure | float
MOST_INSIDE = 10  # curves whose names have room beside them
GRAY = {"color": "gray", "linewidth": 0.8}


@contextmanager
def drawn(path: str | Path, *grid: int, size: tuple[float, float], **options: Any) -> Iterator[Any]:
    """Give axes to draw on, and write them into the file afterwards. size: in inches. options: of pyplot.subplots."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(*grid, figsize=size, **options)
    yield axes
    figure.tight_layout()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)


def figure_of(value: Value) -> Figure:
    """Return the figure, or that of a number."""
    return value if isinstance(value, Figure) else Figure(value, value, value, 1)


def bars(
    path: str | Path, values: Mapping[str, Value], label: str, lines: Iterable[float] = (), **options: Any
) -> None:
    """Draw a bar a value, the first at the top. values: by name."""
    grouped(path, list(values), {"": list(values.values())}, label, lines, **options)


def grouped(
    path: str | Path,
    names: Sequence[str],
    series: Mapping[str, Sequence[Value]],
    label: str,
    lines: Iterable[float] = (),
    **options: Any,
) -> None:
    """Draw bars beside each other for each name, the first at the top. series: by the legend, a value for each name."""
    with drawn(path, size=(7, 0.3 * len(names) * max(len(series) / 2, 1) + 1)) as axes:
        height = 0.8 / len(series)
        for number, (words, values) in enumerate(series.items()):
            places = [place + number * height for place in range(len(names))]
            figures = [figure_of(value) for value in values]
            spread = [[each.median - each.low for each in figures], [each.high - each.median for each in figures]]
            axes.barh(places, [each.median for each in figures], height, xerr=spread, label=words)
        for line in lines:
            axes.axvline(line, **GRAY)
        axes.set_yticks([place + 0.4 - height / 2 for place in range(len(names))], names, fontsize="small")
        axes.invert_yaxis()
        axes.set(xlabel=label, **options)
        if len(series) > 1:
            axes.legend(fontsize="small")


def stacked(path: str | Path, steps: Mapping[str, Mapping[str, float]], label: str, **options: Any) -> None:
    """Draw the parts of each step one after the other. steps: by name, the sizes of their parts by name."""
    with drawn(path, size=(9, 0.5 * len(steps) + 1.5)) as axes:
        left = [0.0] * len(steps)
        for part in next(iter(steps.values())):
            widths = [parts[part] for parts in steps.values()]
            axes.barh(list(steps), widths, left=left, label=part)
            left = [before + width for before, width in zip(left, widths, strict=True)]
        axes.invert_yaxis()
        axes.set(xlabel=label, **options)
        axes.legend(fontsize="small", ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.25))


def groups(rows: Iterable[Row], *names: str) -> dict[tuple[Any, ...], list[Row]]:
    """Return the rows by their values of these names."""
    by_values: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        by_values.setdefault(tuple(row[name] for name in names), []).append(row)
    return by_values


def curve(axes: Any, rows: Sequence[Row], x: str, y: str, style: str = "o-", **options: Any) -> None:
    """Draw the medians of a value over another value, of the rows that have it. options: as of Axes.plot."""
    having = [row for row in rows if row.get(y) is not None]
    axes.plot([row[x] for row in having], [figure_of(row[y]).median for row in having], style, **options)


def add_curves(
    axes: Any,
    rows: Sequence[Row],
    x: str,
    values: Sequence[str],
    by: Sequence[str] = (),
    lines: Iterable[float] = (),
    style: str = "o-",
    **options: Any,
) -> None:
    """Draw as `curves` does, on axes."""
    for names, fitting in groups(rows, *by).items():
        for value in values:
            curve(axes, fitting, x, value, style, label=", ".join(map(str, names)) if by else value)
    for line in lines:
        axes.axhline(line, **GRAY)
    axes.set(**{"xlabel": x, **options})
    if len(axes.get_lines()) > MOST_INSIDE:
        axes.legend(fontsize=6, loc="center left", bbox_to_anchor=(1, 0.5))
    else:
        axes.legend(fontsize="small")


def curves(
    path: str | Path, rows: Sequence[Row], x: str, values: Sequence[str], by: Sequence[str] = (), **options: Any
) -> None:
    """Draw the named values over those of `x`, with a curve for each group of rows that are alike in the names `by`."""
    with drawn(path, size=(8, 4.5)) as axes:
        add_curves(axes, rows, x, values, by, **options)


def panels(path: str | Path, rows: Sequence[Row], panel: str, **options: Any) -> None:
    """Draw as `curves` does, on axes for each value of the name `panel`."""
    parts = groups(rows, panel)
    with drawn(path, 1, len(parts), size=(4.5 * len(parts), 4), squeeze=False) as grid:
        for axes, ((name,), fitting) in zip(grid[0], parts.items(), strict=True):
            add_curves(axes, fitting, title=f"{panel} {name}", **options)

"""Pictures of benchmarks: bars, curves and stacked parts, of medians."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvpage.benchmarks.figure import Figure

Row = Mapping[str, Any]


@contextmanager
def drawn(path: str | Path, *grid: int, size: tuple[float, float], **options: Any) -> Iterator[Any]:
    """Give axes to draw on, and write them into a file afterwards.

    Args:
        path: The file.
        *grid: Rows and columns of axes; none for one.
        size: In inches.
        **options: As of pyplot.subplots.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(*grid, figsize=size, **options)
    yield axes
    figure.tight_layout()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)


def bars(
    path: str | Path, values: Mapping[str, Figure | float], label: str, lines: Iterable[float] = (), **options: Any
) -> None:
    """Draw a bar a value, the first at the top.

    Args:
        path: The file.
        values: By name.
        label: Of their axis.
        lines: Values to mark.
        **options: As of Axes.set.
    """
    with drawn(path, size=(7, 0.3 * len(values) + 1)) as axes:
        add_bars(axes, values, label, lines, **options)


def add_bars(
    axes: Any, values: Mapping[str, Figure | float], label: str, lines: Iterable[float] = (), **options: Any
) -> None:
    """Draw as `bars` does, on axes."""
    axes.barh(list(values), [value.median if isinstance(value, Figure) else value for value in values.values()])
    for line in lines:
        axes.axvline(line, color="gray", linewidth=0.8)
    axes.invert_yaxis()
    axes.set(xlabel=label, **options)


def stacked(path: str | Path, steps: Mapping[str, Mapping[str, float]], label: str, **options: Any) -> None:
    """Draw the parts of each step one after the other.

    Args:
        path: The file.
        steps: By name, the sizes of their parts by name.
        label: Of their axis.
        **options: As of Axes.set.
    """
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
    """Return the rows that have the same values of these names, by these values, in their order."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in names), []).append(row)
    return found


def curve(axes: Any, rows: Sequence[Row], x: str, y: str, style: str = "o-", **options: Any) -> None:
    """Draw the medians of a value over another value. options: as of Axes.plot."""
    values = [row[y].median if isinstance(row[y], Figure) else row[y] for row in rows]
    axes.plot([row[x] for row in rows], values, style, **options)

"""The table that a run ends with: how the parts went, and a row a target."""

from collections.abc import Sequence

from .part import Outcome
from .targets import TARGETS, Target


def summary_of(outcomes: Sequence[Outcome]) -> str:
    """Return the table, which ends in a newline.

    Args:
        outcomes: Of the parts until now.
    """
    parts = [f"{outcome.part:24}{outcome.seconds:8.1f} s  {_end_of(outcome)}" for outcome in outcomes]
    return "\n".join([*parts, "", *target_lines(outcomes), ""])


def target_lines(outcomes: Sequence[Outcome]) -> list[str]:
    """Return a line a target, after the header: shares are of the bound unless a unit is given.

    Args:
        outcomes: Of the parts until now.
    """
    results = {outcome.part: outcome.result or {} for outcome in outcomes}
    header = f"{'':32}{'predicted':22}{'measured':>12}  bound"
    return [header, *(_line(target, target.find(results.get(target.part, {}))) for target in TARGETS)]


def _line(target: Target, measured: float | None) -> str:
    figure = "not measured" if measured is None else f"{measured:.2f}"
    line = f"{target.name:32}{target.predicted:22}{figure:>12}  {target.bound:14}{target.verdict(measured)}"
    return line.rstrip()


def _end_of(outcome: Outcome) -> str:
    if outcome.code is None:
        return "no time left"
    return f"FAILED with exit code {outcome.code}: {outcome.last_line[:120]}" if outcome.has_failed else "passed"

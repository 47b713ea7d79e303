"""What `kvpage bench serve` prints and draws."""

import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Protocol

from kvpage.benchmarks.figure import Figure
from kvpage.benchmarks.serve_load import Outcome
from kvpage.benchmarks.serve_summary import MEASURES, PERCENTS, WORDS, Summary, measures_of

LEAST_MS = 1e-3  # a logarithmic axis has no zero, and several chunks may come at once
MOST_TICKS = 5


class Measured(Protocol):
    """Rounds of all contenders. summaries, outcomes: by server. num_parted: answers that are not the Engine's."""

    summaries: dict[str, list[Summary]]
    outcomes: dict[str, list[Outcome]]
    num_parted: int

    def figures(self) -> Mapping[str, Figure]:
        """Return the tokens a second of each contender, round by round."""

    def losses(self) -> Mapping[str, Figure]:
        """Return the share of the Engine's tokens a second that each other way through the same process lacks."""


def report(measured: Measured) -> None:
    """Print the tables, what is lost beside the Engine, and the errors."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 140)
    table = Table("contender", "tokens/s", "ok", "aborted", "failed", "cached", "requests/s", "goodput")
    for name, rate in measured.figures().items():
        each = measured.summaries.get(name)
        table.add_row(name, f"{rate:.0f}", *(counts_of(each) if each else ["-"] * 6))
    console.print(table)
    times = Table("contender", "milliseconds", *(f"p{percent}" for percent in PERCENTS))
    for name, each in measured.summaries.items():
        for measure in MEASURES:
            found = [one.percentiles[measure] for one in each if one.percentiles[measure]]
            cells = [
                f"{statistics.median(one[percent] for one in found):.1f}" if found else "-" for percent in PERCENTS
            ]
            times.add_row(name, WORDS[measure], *cells)
    console.print(times)
    for name, loss in measured.losses().items():
        console.print(
            f"{name}: {loss.median:.1%} ({loss.low:.1%} to {loss.high:.1%}) below the Engine's tokens a second"
        )
    if measured.num_parted:
        console.print(f"kvpage: the texts of {measured.num_parted} requests are not the Engine's")
    for name, each in measured.summaries.items():
        for error in sorted({error for one in each for error in one.errors}):
            console.print(f"{name}: a request failed: {error}", markup=False)


def counts_of(each: Sequence[Summary]) -> list[str]:
    """Return the cells of a contender's counts, over all rounds."""
    goodputs = [one.goodput for one in each if one.goodput is not None]
    prompts = sum(one.num_prompt_tokens for one in each)
    return [
        str(sum(one.num_ok for one in each)),
        str(sum(one.num_aborted for one in each)),
        str(sum(one.num_failed for one in each)),
        f"{sum(one.num_cached_tokens for one in each) / prompts:.0%}" if prompts else "-",
        f"{statistics.median(one.num_ok / one.seconds for one in each):.2f}",
        f"{statistics.median(goodputs):.2f}" if goodputs else "-",
    ]


def plot(measured: Measured, path: str) -> None:
    """Draw, for each measure, the share of requests that were at least as fast."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    figure, axes = pyplot.subplots(1, len(MEASURES), figsize=(4 * len(MEASURES), 3.6), sharey=True)
    for axis, measure in zip(axes, MEASURES, strict=True):
        every: list[float] = []
        for name, outcomes in measured.outcomes.items():
            ok = [one for one in outcomes if one.status == "ok"]
            values = sorted(max(value, LEAST_MS) for one in ok for value in measures_of(one)[measure])
            axis.step(values, [(index + 1) / len(values) for index in range(len(values))], label=name)
            every += values
        axis.set(xlabel="ms", title=WORDS[measure], xscale="log", ylim=(0, 1.02))
        ticks = ticks_between(min(every), max(every)) if every else []
        axis.xaxis.set_major_locator(ticker.FixedLocator(ticks))
        axis.xaxis.set_minor_locator(ticker.NullLocator())
        axis.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:.6g}"))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("share of requests")
    axes[-1].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def ticks_between(low: float, high: float) -> list[float]:
    """Return at most MOST_TICKS numbers of few digits from low to high, which are more than 0.

    They are powers of ten, or go by 1, 3 or by 1, 2, 5, where at least three such lie there. Otherwise they are as far
    apart as each other.
    """
    powers = [10.0**exponent for exponent in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]
    for digits in ((1,), (1, 3), (1, 2, 5)):
        found = [digit * power for power in powers for digit in digits if low <= digit * power <= high]
        if len(found) >= 3:
            return found[:: math.ceil(len(found) / MOST_TICKS)]
    least = (high - low) / (MOST_TICKS - 1)
    if least == 0:
        return [low]
    power = 10.0 ** math.floor(math.log10(least))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least)
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]

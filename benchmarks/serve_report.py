"""What `kvpage bench serve` prints and draws."""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvpage.benchmarks.cells import show_all
from kvpage.benchmarks.figure import Figure
from kvpage.benchmarks.pictures import drawn
from kvpage.benchmarks.serve_load import Outcome
from kvpage.benchmarks.serve_summary import PERCENTS, WORDS, Summary, measures_of

LEAST_MS = 1e-3  # a logarithmic axis has no zero, and several chunks may come at once
MOST_TICKS = 5
COUNTS = (
    "{contender:<24} {tokens/s:>18.0f} {ok:>7} {aborted:>8} {failed:>7} {cached:>7.0%} {requests/s:>11.2f}"
    " {goodput:>8.2f}"
)
TIMES = "{contender:<24} {milliseconds:<22}" + "".join(f" {{p{percent}:>10.1f}}" for percent in PERCENTS)


def show(rates: Mapping[str, Figure], summaries: Mapping[str, Sequence[Summary]]) -> None:
    """Print the counts and the times of each contender, and the errors of requests.

    Args:
        rates: Tokens a second, by contender.
        summaries: Of each server, one a round.
    """
    show_all(COUNTS, [counts_of(name, rate, summaries.get(name, ())) for name, rate in rates.items()])
    print()
    show_all(TIMES, [times_of(name, each, measure) for name, each in summaries.items() for measure in WORDS])
    for name, each in summaries.items():
        for error in sorted({error for one in each for error in one["errors"]}):
            print(f"{name}: a request failed: {error}")


def counts_of(name: str, rate: Figure, each: Sequence[Summary]) -> dict[str, Any]:
    """Return a contender's counts, over all rounds; its tokens a second alone where it has no summaries."""
    row: dict[str, Any] = {"contender": name, "tokens/s": rate}
    if not each:
        return row
    sums = {key: sum(one[key] for one in each) for key in ("ok", "aborted", "failed")}
    num_prompt, num_cached = (sum(one[key] for one in each) for key in ("prompt_tokens", "cached_tokens"))
    goodputs = [one["goodput"] for one in each if one["goodput"] is not None]
    rates = {
        "cached": num_cached / num_prompt if num_prompt else None,
        "requests/s": statistics.median(one["requests_per_second"] for one in each),
        "goodput": statistics.median(goodputs) if goodputs else None,
    }
    return row | sums | rates


def times_of(name: str, each: Sequence[Summary], measure: str) -> dict[str, Any]:
    """Return the percentiles of a measure, each a median over the rounds."""
    found = [one["ms"][measure] for one in each if one["ms"][measure]]
    row = {f"p{percent}": statistics.median(one[percent] for one in found) for percent in PERCENTS} if found else {}
    return {"contender": name, "milliseconds": WORDS[measure], **row}


def plot(outcomes: Mapping[str, Sequence[Outcome]], path: Path) -> None:
    """Draw, for each measure, the share of requests that were at least as fast. outcomes: by server."""
    with drawn(path, 1, len(WORDS), size=(4 * len(WORDS), 3.6), sharey=True) as panels:
        for axes, measure in zip(panels, WORDS, strict=True):
            draw_measure(axes, outcomes, measure)
        panels[0].set_ylabel("share of requests")
        panels[-1].legend()


def draw_measure(axes: Any, outcomes: Mapping[str, Sequence[Outcome]], measure: str) -> None:
    from matplotlib import ticker

    every: list[float] = []
    for name, each in outcomes.items():
        ok = [one for one in each if one.status == "ok"]
        values = sorted(max(value, LEAST_MS) for one in ok for value in measures_of(one)[measure])
        axes.step(values, [(index + 1) / len(values) for index in range(len(values))], label=name)
        every += values
    axes.set(xlabel="ms", title=WORDS[measure], xscale="log", ylim=(0, 1.02))
    axes.xaxis.set_major_locator(ticker.FixedLocator(ticks_between(min(every), max(every)) if every else []))
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:.6g}"))
    axes.grid(alpha=0.3)


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

"""What `kvpage bench serve` sums up, prints and draws: counts, rates, percentiles and goodput."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from kvpage.benchmarks.cells import Row, shown
from kvpage.benchmarks.figure import Figure
from kvpage.benchmarks.pictures import drawn
from kvpage.benchmarks.serve_load import Outcome

PERCENTS = (50, 90, 99)
WORDS = {
    "ttft": "time to first token",
    "tpot": "time a token after it",
    "itl": "between two chunks",
    "e2e": "end to end",
}
"""The measures of a request, and their words."""
COUNTS = (
    "{contender:<24} {tokens/s:>18.0f} {ok:>7} {aborted:>8} {failed:>7} {cached:>7.0%} {requests/s:>11.2f}"
    " {goodput:>8.2f}"
)
TIMES = "{contender:<24} {milliseconds:<22}" + "".join(f" {{p{percent}:>10.1f}}" for percent in PERCENTS)


def summarize(outcomes: Sequence[Outcome], limits: Mapping[str, float]) -> Row:
    """Sum a load on one server up. "ms" has the percentiles by measure; "errors" has the first five that differ.

    limits: milliseconds of measures that a good request keeps at most; empty for no goodput.
    """
    ok = [one for one in outcomes if one.status == "ok"]
    each = [one.measures() for one in ok]
    failed = [one for one in outcomes if one.status == "failed"]
    seconds = max(one.end for one in outcomes) - min(one.begin for one in outcomes)
    num_good = sum(all(max(one[name], default=0.0) <= most for name, most in limits.items()) for one in each)
    num_output = sum(one.num_output_tokens for one in ok)
    return {
        "ok": len(ok),
        "aborted": len(outcomes) - len(ok) - len(failed),
        "failed": len(failed),
        "seconds": seconds,
        "prompt_tokens": sum(one.num_prompt_tokens for one in ok),
        "cached_tokens": sum(one.num_cached_tokens for one in ok),
        "output_tokens": num_output,
        "tokens_per_second": num_output / seconds,
        "requests_per_second": len(ok) / seconds,
        "goodput": num_good / seconds if limits else None,
        "ms": {name: percentiles([value for one in each for value in one[name]]) for name in WORDS},
        "errors": sorted({one.error for one in failed})[:5],
    }


def percentiles(values: Sequence[float]) -> dict[int, float]:
    """Return the percentiles of PERCENTS; none of no values."""
    return dict(zip(PERCENTS, np.percentile(values, PERCENTS).tolist(), strict=True)) if values else {}


def show(rates: Mapping[str, Figure], summaries: Mapping[str, Sequence[Row]]) -> None:
    """Print the counts and the times of each contender, and the errors of requests. summaries: one a round."""
    shown(COUNTS, (counts_of(name, rate, summaries.get(name, ())) for name, rate in rates.items()))
    print()
    shown(TIMES, (row for name, each in summaries.items() for row in times_of(name, each)))
    for name, each in summaries.items():
        for error in sorted({error for one in each for error in one["errors"]}):
            print(f"{name}: a request failed: {error}")


def counts_of(name: str, rate: Figure, each: Sequence[Row]) -> Row:
    """Return a contender's counts, over all rounds; its tokens a second alone where it has no summaries."""
    row: Row = {"contender": name, "tokens/s": rate}
    if each:
        row |= {key: sum(summary[key] for summary in each) for key in ("ok", "aborted", "failed")}
        num_prompt, num_cached = (sum(summary[f"{key}_tokens"] for summary in each) for key in ("prompt", "cached"))
        row["cached"] = num_cached / num_prompt if num_prompt else None
        row["requests/s"] = statistics.median(summary["requests_per_second"] for summary in each)
        goodputs = [summary["goodput"] for summary in each if summary["goodput"] is not None]
        row["goodput"] = statistics.median(goodputs) if goodputs else None
    return row


def times_of(name: str, each: Sequence[Row]) -> Iterator[Row]:
    """Yield the percentiles of each measure, medians over the rounds."""
    for measure, words in WORDS.items():
        found = [one["ms"][measure] for one in each if one["ms"][measure]]
        row = {f"p{percent}": statistics.median(one[percent] for one in found) for percent in PERCENTS if found}
        yield {"contender": name, "milliseconds": words, **row}


def plot(outcomes: Mapping[str, Sequence[Outcome]], path: Path) -> None:
    """Draw, for each measure, the share of requests that were at least as fast. outcomes: by server."""
    with drawn(path, 1, len(WORDS), size=(4 * len(WORDS), 3.6), sharey=True) as panels:
        for axes, (measure, words) in zip(panels, WORDS.items(), strict=True):
            for name, each in outcomes.items():
                ok = [one for one in each if one.status == "ok"]
                values = sorted(value for one in ok for value in one.measures()[measure])
                axes.step(values, [(index + 1) / len(values) for index in range(len(values))], label=name)
            axes.set(xlabel="ms", title=words, ylim=(0, 1.02))
            axes.locator_params(axis="x", nbins=4)
            axes.grid(alpha=0.3)
        panels[0].set_ylabel("share of requests")
        panels[-1].legend()

"""Summary of a load: counts, rates, percentiles, and goodput: requests a second that keep all limits."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvpage.benchmarks.serve_load import Outcome

PERCENTS = (50, 90, 99)
WORDS = {
    "ttft": "time to first token",
    "tpot": "time a token after it",
    "itl": "between two chunks",
    "e2e": "end to end",
}
"""The measures of a request, and their words."""
Summary = dict[str, Any]


def measures_of(outcome: Outcome) -> dict[str, list[float]]:
    """Return the milliseconds of each measure of a complete request."""
    gaps = [after - before for before, after in zip(outcome.times, outcome.times[1:], strict=False)]
    found = {"ttft": [outcome.first], "itl": gaps, "e2e": [outcome.end - outcome.begin]}
    found["tpot"] = [] if outcome.per_token is None else [outcome.per_token]
    return {name: [value * 1000 for value in values] for name, values in found.items()}


def summarize(outcomes: Sequence[Outcome], limits: Mapping[str, float]) -> Summary:
    """Sum a load up. "ms" has the percentiles by measure; "errors" has the first five that differ.

    Args:
        outcomes: Of one load on one server.
        limits: Milliseconds of measures that a good request keeps at most; empty for no goodput.
    """
    ok = [one for one in outcomes if one.status == "ok"]
    each = [measures_of(one) for one in ok]
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

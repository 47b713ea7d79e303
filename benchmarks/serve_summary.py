"""Summary of a load: counts, rates, percentiles, and goodput: requests a second that keep all limits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvpage.benchmarks.serve_load import Outcome

PERCENTS = (50, 90, 99)
MEASURES = ("ttft", "tpot", "itl", "e2e")
WORDS = {
    "ttft": "time to first token",
    "tpot": "time a token after it",
    "itl": "between two chunks",
    "e2e": "end to end",
}


@dataclass(frozen=True, slots=True)
class Summary:
    """One load on one server. Times are in milliseconds; percentiles by measure and percent."""

    num_ok: int
    num_aborted: int
    num_failed: int
    seconds: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_good: int | None
    percentiles: dict[str, dict[int, float]]
    errors: tuple[str, ...]

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens of complete requests a second."""
        return self.num_output_tokens / self.seconds

    @property
    def goodput(self) -> float | None:
        """Requests a second that kept the limits; None without limits."""
        return None if self.num_good is None else self.num_good / self.seconds

    def as_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {
            "ok": self.num_ok, "aborted": self.num_aborted, "failed": self.num_failed, "seconds": self.seconds,
            "prompt_tokens": self.num_prompt_tokens, "cached_tokens": self.num_cached_tokens,
            "output_tokens": self.num_output_tokens, "tokens_per_second": self.tokens_per_second,
            "requests_per_second": self.num_ok / self.seconds, "goodput": self.goodput, "ms": self.percentiles,
            "errors": self.errors,
        }  # fmt: skip


def measures_of(outcome: Outcome) -> dict[str, list[float]]:
    """Return the milliseconds of each measure of a complete request."""
    gaps = [after - before for before, after in zip(outcome.times, outcome.times[1:], strict=False)]
    found = {"ttft": [outcome.first], "itl": gaps, "e2e": [outcome.end - outcome.begin]}
    found["tpot"] = [] if outcome.per_token is None else [outcome.per_token]
    return {name: [value * 1000 for value in values] for name, values in found.items()}


def summarize(outcomes: Sequence[Outcome], limits: Mapping[str, float]) -> Summary:
    """Sum a load up. limits: milliseconds of measures that a good request keeps at most; empty for none."""
    ok = [one for one in outcomes if one.status == "ok"]
    each = [measures_of(one) for one in ok]
    values = {name: [value for one in each for value in one[name]] for name in MEASURES}
    num_good = sum(all(max(one[name], default=0.0) <= most for name, most in limits.items()) for one in each)
    failed = [one for one in outcomes if one.status == "failed"]
    return Summary(
        num_ok=len(ok),
        num_aborted=sum(one.status == "aborted" for one in outcomes),
        num_failed=len(failed),
        seconds=max(one.end for one in outcomes) - min(one.begin for one in outcomes),
        num_prompt_tokens=sum(one.num_prompt_tokens for one in ok),
        num_cached_tokens=sum(one.num_cached_tokens for one in ok),
        num_output_tokens=sum(one.num_output_tokens for one in ok),
        num_good=num_good if limits else None,
        percentiles={name: percentiles(found) for name, found in values.items()},
        errors=tuple(sorted({one.error for one in failed}))[:5],
    )


def percentiles(values: Sequence[float]) -> dict[int, float]:
    """Return the percentiles of PERCENTS; none of no values."""
    return dict(zip(PERCENTS, np.percentile(values, PERCENTS).tolist(), strict=True)) if values else {}

"""The requests of `kvpage bench serve`, and the numbers that sum a load up."""

import json
import math
import statistics

import pytest

from kvpage.benchmarks.serve_load import Outcome
from kvpage.benchmarks.serve_report import PERCENTS, percentiles, summarize
from kvpage.benchmarks.serve_requests import (
    FIRST_ID,
    MOST,
    Shape,
    make_requests,
    requests_of_trace,
    with_arrivals,
    with_leavers,
)
from kvpage.tools.replay import TraceRequest

SHAPE = Shape(vocab=500, input_len=7, output_len=5, prefix_len=9, num_prefixes=2)


@pytest.mark.parametrize("dataset", ["random", "sharegpt", "prefix"])
def test_a_seed_gives_the_same_requests(dataset: str) -> None:
    requests = make_requests(dataset, 20, SHAPE)
    assert requests == make_requests(dataset, 20, SHAPE)
    assert requests[:5] == make_requests(dataset, 5, SHAPE), "more requests change the first ones"
    assert requests != make_requests(dataset, 20, Shape(**{**shape_fields(SHAPE), "seed": 1}))
    assert all(FIRST_ID <= token < SHAPE.vocab for one in requests for token in one.prompt)
    assert all(one.arrival is None and one.leaves_after is None for one in requests)


def shape_fields(shape: Shape) -> dict[str, int]:
    return {name: getattr(shape, name) for name in Shape.__slots__}


def test_lengths_of_each() -> None:
    random = make_requests("random", 9, SHAPE)
    assert {(len(one.prompt), one.max_tokens) for one in random} == {(7, 5)}
    assert len({tuple(one.prompt) for one in random}) == 9
    chats = make_requests("sharegpt", 2000, SHAPE)
    for lengths, median in (([len(one.prompt) for one in chats], 100), ([one.max_tokens for one in chats], 140)):
        assert min(lengths) >= 4 and max(lengths) <= MOST
        assert statistics.median(lengths) == pytest.approx(median, rel=0.1)
    prefixed = make_requests("prefix", 50, SHAPE)
    assert {len(one.prompt) for one in prefixed} == {16} and len({tuple(one.prompt[:9]) for one in prefixed}) == 2
    assert len({tuple(one.prompt) for one in prefixed}) == 50


TRACE = [
    TraceRequest(0, 1000, 50, [1, 2]),
    TraceRequest(1500, 1300, 1, [1, 2, 3]),
    TraceRequest(1500, 600, 7, [9, 2]),
    TraceRequest(2000, 0, 0, []),
]


@pytest.mark.parametrize("scale", [1.0, 0.1, 0.001])
def test_a_trace_keeps_times_lengths_and_what_is_shared(scale: float) -> None:
    first, second, third, empty = requests_of_trace(TRACE, 9, SHAPE, scale)
    assert [one.arrival for one in (first, second, third, empty)] == [0.0, 1.5, 1.5, 2.0]
    assert [len(one.prompt) for one in (first, second, third)] == [max(1, int(n * scale)) for n in (1000, 1300, 600)]
    assert [one.max_tokens for one in (first, second, third, empty)] == [max(1, int(n * scale)) for n in (50, 1, 7, 0)]
    assert empty.prompt == [FIRST_ID]
    num_shared = min(len(first.prompt), len(second.prompt))
    assert first.prompt[:num_shared] == second.prompt[:num_shared]
    if scale == 1.0:
        assert third.prompt[:512] != first.prompt[:512] and third.prompt[512:] == first.prompt[512:600]


def test_only_the_first_of_a_trace() -> None:
    assert len(requests_of_trace(iter(TRACE), 2, SHAPE, 1.0)) == 2


@pytest.mark.parametrize("rate", [0.5, 40.0])
def test_arrivals_of_a_poisson_process(rate: float) -> None:
    requests = make_requests("random", 4000, SHAPE)
    times = [one.arrival for one in with_arrivals(requests, rate, seed=0)]
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    assert min(gaps) >= 0 and times == sorted(times)
    assert statistics.mean(gaps) == pytest.approx(1 / rate, rel=0.05)
    assert statistics.pstdev(gaps) == pytest.approx(1 / rate, rel=0.07)  # of an exponential: as its mean


def test_an_infinite_rate_sends_all_at_once() -> None:
    assert {one.arrival for one in with_arrivals(make_requests("random", 5, SHAPE), math.inf, seed=0)} == {0.0}


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_leavers(share: float) -> None:
    requests = with_leavers(make_requests("random", 1000, SHAPE), share, seed=0)
    leaving = [one for one in requests if one.leaves_after is not None]
    assert len(leaving) / 1000 == pytest.approx(share, abs=0.05)
    assert all(0 <= one.leaves_after < one.max_tokens for one in leaving)


# --- numbers ---------------------------------------------------------------------------------------------------------


def naive(values: list[float], percent: int) -> float:
    """Interpolate between the two nearest ranks."""
    ordered, place = sorted(values), (len(values) - 1) * percent / 100
    low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
    return low + (high - low) * (place - math.floor(place))


@pytest.mark.parametrize("num", [1, 2, 3, 99, 100, 101])
def test_percentiles(num: int) -> None:
    values = [float((index * 37) % 101) for index in range(num)]
    assert percentiles(values) == pytest.approx({percent: naive(values, percent) for percent in PERCENTS})


def test_percentiles_of_nothing() -> None:
    assert percentiles([]) == {}


def ok(begin: float, *times: float, num_tokens: int | None = None) -> Outcome:
    return Outcome("ok", begin, times[-1] + 0.5, times, 10, len(times) if num_tokens is None else num_tokens, 4, "text")


def test_measures_of_a_request() -> None:
    assert ok(1.0, 1.5, 1.75, 2.5).measures() == {"ttft": [500.0], "tpot": [500.0], "itl": [250.0, 750.0],
                                                   "e2e": [2000.0]}  # fmt: skip
    assert ok(1.0, 1.5).measures() == {"ttft": [500.0], "tpot": [], "itl": [], "e2e": [1000.0]}
    several = ok(1.0, 1.5, 2.5, num_tokens=5).measures()
    assert (several["itl"], several["tpot"]) == ([1000.0], [250.0])


OUTCOMES = [
    ok(1.0, 1.5, 2.0),
    ok(2.0, 4.0, 4.25),
    Outcome("failed", 0.5, 0.75, error="b"),
    Outcome("failed", 1.0, 1.25, error="a"),
    Outcome("failed", 1.0, 1.25, error="a"),
    Outcome("aborted", 1.0, 2.0),
]


def test_a_load_is_summed_up() -> None:
    summary = summarize(OUTCOMES, {})
    assert (summary["ok"], summary["failed"], summary["aborted"]) == (2, 3, 1)
    assert (summary["prompt_tokens"], summary["cached_tokens"], summary["output_tokens"]) == (20, 8, 4)
    assert (summary["seconds"], summary["errors"], summary["goodput"]) == (4.25, ["a", "b"], None)
    assert summary["tokens_per_second"] == pytest.approx(4 / 4.25)
    assert summary["ms"]["ttft"][50] == pytest.approx(1250.0)
    assert json.loads(json.dumps(summary))["failed"] == 3


@pytest.mark.parametrize(
    ("limits", "num_good"),
    [
        ({"ttft": 500.0}, 1), ({"ttft": 499.9}, 0), ({"ttft": 2000.0}, 2), ({"ttft": 2000.0, "itl": 300.0}, 1),
        ({"tpot": 250.0}, 1), ({"e2e": 1500.0}, 1), ({"e2e": 2750.0, "tpot": 500.0}, 2),
    ],
)  # fmt: skip
def test_goodput_keeps_all_limits(limits: dict[str, float], num_good: int) -> None:
    assert summarize(OUTCOMES, limits)["goodput"] == pytest.approx(num_good / 4.25)


def test_nothing_succeeds() -> None:
    summary = summarize(OUTCOMES[2:], {"ttft": 1.0})
    assert (summary["ok"], summary["tokens_per_second"], summary["goodput"]) == (0, 0.0, 0.0)
    assert summary["ms"] == {"ttft": {}, "tpot": {}, "itl": {}, "e2e": {}}

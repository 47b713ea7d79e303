"""A figure of a benchmark: its quartiles against sorting by hand, its text, its line of JSON; how calls take turns."""

import json
import math

import pytest

from kvpage.benchmarks.figure import Figure, dumps, in_turns, seconds, within


def quartile(values: list[float], share: float) -> float:
    """By linear interpolation between the sorted values around it."""
    place = share * (len(values) - 1)
    low, high = sorted(values)[math.floor(place)], sorted(values)[math.ceil(place)]
    return low + (high - low) * (place - math.floor(place))


@pytest.mark.parametrize("num", [1, 2, 3, 4, 5, 16])
def test_median_and_quartiles_are_those_of_sorted_values(num: int) -> None:
    values = [float((7 * i) % 16) for i in range(num)]
    figure = Figure.of(values, scale=2.0)
    want = tuple(2 * quartile(values, share) for share in (0.5, 0.25, 0.75))
    assert (figure.median, figure.low, figure.high) == pytest.approx(want)
    assert figure.num == num


@pytest.mark.parametrize("values", [[], [float("nan")], [1.0, float("inf")]])
def test_nothing_and_what_is_no_number_is_no_figure(values: list[float]) -> None:
    with pytest.raises(ValueError, match="values must be one or more finite numbers"):
        Figure.of(values)


def test_a_ratio_is_taken_turn_by_turn() -> None:
    """A turn in which the machine was three times as slow leaves it as it is."""
    assert Figure.ratio([2.0, 6.0, 2.0], [1.0, 3.0, 1.0]) == Figure(2.0, 2.0, 2.0, 3)
    with pytest.raises(ValueError):
        Figure.ratio([1.0], [1.0, 2.0])


def test_a_rate_is_an_amount_over_each_turn() -> None:
    assert Figure.rate(10, [2.0, 5.0, 1.0]).median == 5.0


def test_text_has_as_many_digits_as_are_asked_for() -> None:
    figure = Figure(3.14159, 3.0, 4.0, 5)
    assert f"{figure:.2f}" == "3.14 (3.00-4.00)"
    assert str(figure) == "3.14 (3.00-4.00)" and str(Figure(314.15, 300.0, 400.0, 5)) == "314 (300-400)"
    assert str(Figure(0.0, 0.0, 0.0, 1)) == "0.00 (0.00-0.00)"


def test_json_names_each_part() -> None:
    line = dumps({"rows": [{"us": Figure(1.5, 1.0, 2.0, 3)}]})
    assert json.loads(line) == {"rows": [{"us": {"median": 1.5, "low": 1.0, "high": 2.0, "num": 3}}]}
    assert "\n" not in line


def test_calls_take_turns_after_a_warm_one() -> None:
    order: list[str] = []
    taken = in_turns({name: lambda name=name: order.append(name) for name in "ab"}, rounds=2, number=3)
    assert "".join(order) == "aaabbb" * 3
    assert [len(taken[name]) for name in "ab"] == [2, 2]


def test_rounds_begin_with_another_call_each_where_they_rotate() -> None:
    order: list[str] = []
    in_turns({name: lambda name=name: order.append(name) for name in "abc"}, rounds=3, rotates=True)
    assert "".join(order) == "abcbcacababc"


def test_seconds_are_a_mean_over_the_loop() -> None:
    clock = iter([0.0, 8.0])
    assert seconds(lambda: None, number=4, clock=lambda: next(clock)) == 2.0


def test_results_end_with_the_time(capsys) -> None:
    assert list(within(math.inf, range(3))) == [0, 1, 2] and capsys.readouterr().out == ""
    assert list(within(0.0, range(3))) == [0]
    assert "stopped after 0 s" in capsys.readouterr().out

"""Ticks of the picture of `kvpage bench serve`: few, round, and between the least and the most."""

import random

import pytest

from kvpage.benchmarks.serve_load import Outcome
from kvpage.benchmarks.serve_report import MOST_TICKS, plot, ticks_between


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (1917.0, 2071.0, [1950, 2000, 2050]),
        (36.1, 63.7, [40, 50, 60]),
        (60.0, 900.0, [100, 200, 500]),
        (1e-3, 900.0, [1e-3, 1e-1, 10]),
        (7.0, 7.0, [7]),
    ],
    ids=["within a tenth", "within a decade", "over a power of ten", "over six", "one value"],
)
def test_ticks_are_round(low, high, ticks):
    assert ticks_between(low, high) == pytest.approx(ticks)


def test_ticks_are_few_and_between():
    rng = random.Random(0)
    for _ in range(2000):
        low = 10 ** rng.uniform(-3, 5)
        high = low * 10 ** rng.choice([rng.uniform(0, 0.01), rng.uniform(0, 1), rng.uniform(0, 8)])
        ticks = ticks_between(low, high)
        assert 1 <= len(ticks) <= MOST_TICKS
        assert low * (1 - 1e-9) <= ticks[0] and ticks[-1] <= high * (1 + 1e-9)
        assert sorted(set(ticks)) == ticks


def test_labels_of_the_picture_keep_apart(tmp_path, monkeypatch):
    """Also where all requests take nearly as long, on an axis of logarithms."""
    pytest.importorskip("matplotlib")
    from matplotlib import pyplot

    done = [
        Outcome("ok", 0.0, 1.9 + 0.01 * number, (0.06 * 1.2**number, 1.0, 1.4), 8, 3, 0, "text") for number in range(16)
    ]
    outcomes = {"kvpage": done, "live": [Outcome("failed", 0.0, 1.0)]}
    close = pyplot.close
    monkeypatch.setattr(pyplot, "close", lambda figure: None)
    plot(outcomes, tmp_path / "serve.png")
    figure = pyplot.gcf()
    for axis in figure.axes:
        labels = [label for label in axis.get_xticklabels(which="both") if label.get_text()]
        assert 1 <= len(labels) <= MOST_TICKS
        assert "times" not in "".join(label.get_text() for label in labels)
        places = sorted((box.x0, box.x1) for box in (label.get_window_extent() for label in labels))
        assert all(end < begin for (_, end), (begin, _) in zip(places, places[1:], strict=False))
    close(figure)

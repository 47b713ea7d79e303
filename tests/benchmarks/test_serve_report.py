"""The picture of `kvpage bench serve`."""

import pytest

from kvpage.benchmarks.serve_load import Outcome
from kvpage.benchmarks.serve_report import plot


def test_labels_of_the_picture_keep_apart(tmp_path, monkeypatch):
    """Also where all requests take nearly as long, and where none has succeeded."""
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
        labels = [label for label in axis.get_xticklabels() if label.get_text()]
        assert labels
        places = sorted((box.x0, box.x1) for box in (label.get_window_extent() for label in labels))
        assert all(end < begin for (_, end), (begin, _) in zip(places, places[1:], strict=False))
    close(figure)

"""The frame of benchmarks: options by their defaults; a line of JSON with settings, without paths and keys."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from kvpage.benchmarks.figure import Figure  # noqa: E402
from kvpage.benchmarks.script import Options, finish, machine, skip  # noqa: E402


def parsed(monkeypatch: pytest.MonkeyPatch, parser: Options, *arguments: str) -> Any:
    monkeypatch.setattr(sys, "argv", ["bench", *arguments])
    return parser.parse()


def test_types_follow_from_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = Options("x", None, rounds=3)
    parser.add("--name", "a")
    parser.add("--sizes", (1, 2))
    parser.add("--names", ["a", "b"])
    parser.add("--share", 0.5)
    options = parsed(monkeypatch, parser, "--sizes", "4", "5", "--names", "c", "--share", "1")
    assert (options.name, options.sizes, options.names, options.share, options.rounds) == ("a", [4, 5], ["c"], 1.0, 3)
    with pytest.raises(SystemExit):
        parsed(monkeypatch, parser, "--sizes", "0")


def test_kvpage_is_not_left_out(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    parser = Options("x", None)
    parser.add_without()
    assert parsed(monkeypatch, parser, "--without", "generate").without == ["generate"]
    with pytest.raises(SystemExit):
        parsed(monkeypatch, parser, "--without", "kvpage")
    assert "--without must leave kvpage in" in capsys.readouterr().err


def test_the_line_has_settings_and_what_was_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    parser = Options("x", None, rounds=3)
    parser.add_vllm()
    parser.add("--seconds", float("inf"))
    parser.add("--api-key", "secret")
    plot, drawn = tmp_path / "x.png", list[Path]()
    options = parsed(monkeypatch, parser, "--plot", str(plot), "--vllm", "/some/python")
    finish(options, drawn.append, rows=[{"us": Figure(2.0, 1.0, 3.0, 4)}])
    said = json.loads(capsys.readouterr().out)
    about = {"benchmark": "x", "machine": machine(), "torch": sys.modules["torch"].__version__, "rounds": 3}
    about |= {name: said[name] for name in ("transformers",) if name in said}
    assert said == {**about, "rows": [{"us": {"median": 2.0, "low": 1.0, "high": 3.0, "num": 4}}]}
    assert drawn == [plot]


def test_without_plot_nothing_is_drawn(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    finish(parsed(monkeypatch, Options("x", None)), lambda path: pytest.fail("drawn"), rows=[])
    assert json.loads(capsys.readouterr().out)["rows"] == []
    skip("needs a device")
    assert json.loads(capsys.readouterr().out) == {"skipped": "needs a device"}

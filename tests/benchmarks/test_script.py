"""The frame of benchmarks: options by their defaults; a line of JSON with settings, without paths and keys."""

import json
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from kvpage.benchmarks.figure import Figure  # noqa: E402
from kvpage.benchmarks.script import DEVICE, VLLM, WITHOUT, finish, machine, option, parse, skip  # noqa: E402


def test_types_follow_from_defaults() -> None:
    defaults = {"name": "a", "sizes": (1, 2), "names": ["a", "b"], "share": 0.5, "is_quick": False, "rounds": 3}
    arguments = ["--sizes", "4", "5", "--names", "c", "--share", "1", "--is-quick"]
    options = parse("x", None, arguments, **defaults)
    assert (options.name, options.sizes, options.names, options.share, options.rounds) == ("a", [4, 5], ["c"], 1.0, 3)
    assert options.is_quick and not parse("x", None, [], **defaults).is_quick


@pytest.mark.parametrize("text", ["0", "-1", "two"])
def test_a_number_that_is_not_positive_is_named(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    for option_name in ("--rounds", "--sizes"):
        with pytest.raises(SystemExit):
            parse("x", None, [option_name, text], rounds=3, sizes=(1, 2))
        words = f"argument {option_name}: it must be a positive integer, got {text!r}"
        assert words in capsys.readouterr().err


def test_kvpage_is_not_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse("x", None, ["--without", "generate"], without=WITHOUT).without == ["generate"]
    with pytest.raises(SystemExit):
        parse("x", None, ["--without", "kvpage"], without=WITHOUT)
    assert "--without must leave kvpage in" in capsys.readouterr().err


def test_options_are_checked_together(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("x", None, [], check=lambda options: f"{options.rounds} are too many", rounds=3)
    assert "3 are too many" in capsys.readouterr().err


def test_a_device_that_is_not_there_ends_the_script(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        parse("x", None, ["--device", "cuda"], device=DEVICE)
    assert ended.value.code == 0 and "needs a CUDA device" in json.loads(capsys.readouterr().out)["skipped"]
    assert parse("x", None, [], device=DEVICE).device == "cpu"


def test_the_line_has_settings_and_what_was_found(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plot, drawn = tmp_path / "x.png", list[Path]()
    defaults = {"rounds": 3, "vllm": VLLM, "seconds": float("inf"), "api_key": "secret", "other": option(None, "words")}
    options = parse("x", None, ["--plot", str(plot), "--vllm", "/some/python"], **defaults)
    finish(options, drawn.append, rows=[{"us": Figure(2.0, 1.0, 3.0, 4)}])
    said = json.loads(capsys.readouterr().out)
    about = {"benchmark": "x", "machine": machine(), "torch": sys.modules["torch"].__version__, "rounds": 3}
    about |= {name: said[name] for name in ("transformers",) if name in said}
    assert said == {**about, "rows": [{"us": {"median": 2.0, "low": 1.0, "high": 3.0, "num": 4}}]}
    assert drawn == [plot]


def test_without_plot_nothing_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    finish(parse("x", None, []), lambda path: pytest.fail("drawn"), rows=[])
    assert json.loads(capsys.readouterr().out)["rows"] == []
    with pytest.raises(SystemExit) as ended:
        skip("needs a device")
    assert ended.value.code == 0 and json.loads(capsys.readouterr().out) == {"skipped": "needs a device"}

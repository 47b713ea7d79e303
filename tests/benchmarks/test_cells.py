"""Cells of tables: fields of a template against texts written by hand."""

import json

import pytest

from kvpage.benchmarks.cells import fill, fill_known, shown, value_at, with_figures
from kvpage.benchmarks.figure import Figure, dumps

ROW = {
    "GB/s": Figure(1234.56, 1000.0, 2000.0, 3),
    "us": {"median": 1},
    "share": 0.25,
    "name": "rows",
    "none": None,
    "interval": [2.0, 1.0, 4.0],
    "is_met": True,
    "is_missed": False,
    "2": 5,
    "many": [Figure(3.0, 1.0, 4.0, 2), Figure(1.0, 0.0, 9.0, 2), Figure(2.0, 2.0, 2.0, 2)],
}


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{GB/s:,.1f} GB/s", "1,234.6 (1,000.0-2,000.0) GB/s"),
        ("{GB/s/100:.0f}", "12 (10-20)"),
        ("{GB/s.median:.2f}", "1234.56"),
        ("{share*100:.1f} %", "25.0 %"),
        ("{us[median]}, {2}", "1, 5"),
        ("{many:.1f}", "1.0 to 3.0"),
        ("{interval:.1f} {interval.low}", "2.0 (1.0-4.0) 1.0"),
        ("{none} {lacking:.2f} {us[lacking]:.1f} {none[key]}", "- - - -"),
        ("{is_met} {is_missed}", "met MISSED"),
        ("{name:<6}|{name:>6}|{name:6}|{share:>7.2f}|{none:>3}", "rows  |  rows|  rows|   0.25|  -"),
    ],
)
def test_fields(template: str, text: str) -> None:
    assert fill(template, ROW) == text


def test_parts_that_ask_for_what_is_lacking_are_left_out() -> None:
    assert fill_known("{name}: a; {lacking}: b; {none}: c; {2}: d", ROW) == "rows: a; 5: d"
    assert fill_known("", ROW) == ""


def test_a_table_has_its_titles_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown("{name:<6} {GB/s:>20.0f}", iter([ROW, ROW])) == [ROW, ROW]
    head, *lines = capsys.readouterr().out.splitlines()
    assert head == f"name   {'GB/s':>20}"
    assert lines == [f"rows   {'1235 (1000-2000)':>20}"] * 2
    assert shown("{name}", []) == [] and capsys.readouterr().out == ""


ROWS = [
    {"what": "find, int32", "seqs": 1, "ratios": [0.15], "us": 5},
    {"what": "find, int64", "seqs": 2, "ratios": [0.3], "us": 6},
    {"what": "insert", "seqs": 2, "ratios": [0.3, 0.15], "us": 7, "mean": [2.0, 1.0, 4.0]},
]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("rows[what=find, int32].us", 5),
        ("rows[seqs=2;what~find].us", 6),
        ("rows[what!~find].us", 7),
        ("rows[ratios=0.3].us", 6),
        ("rows[*;seqs>1].us", [6, 7]),
        ("rows[what=insert].mean", [2.0, 1.0, 4.0]),
        ("rows[what=insert].mean.low", 1.0),
        ("rows[what=nothing].us", None),
        ("rows[*;what=nothing].us", None),
        ("other[key].us", None),
    ],
)
def test_a_path_finds_a_value(path: str, value: object) -> None:
    assert value_at({"rows": ROWS}, path) == value


@pytest.mark.parametrize(
    ("path", "words"),
    [("rows[seqs=2].us", "hold in 2"), ("rows[us].us", "a condition must be like seqs=256, got 'us'")],
)
def test_a_path_must_be_clear(path: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        value_at({"rows": ROWS}, path)


def test_figures_come_back_from_json() -> None:
    row = {"us": Figure(2.0, 1.0, 3.0, 4), "other": {"median": 2.0}}
    assert json.loads(dumps(row), object_hook=with_figures) == row

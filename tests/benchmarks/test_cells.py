"""Cells of tables: fields of a template against texts written by hand."""

import json

import pytest

from kvpage.benchmarks.cells import Table, fill, fill_known, markdown, with_figures
from kvpage.benchmarks.figure import Figure, dumps

ROW = {
    "GB/s": Figure(1234.56, 1000.0, 2000.0, 3),
    "us": {"median": 1},
    "share": 0.25,
    "name": "rows",
    "none": None,
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
    table = Table("{name:<6} {GB/s:>20.0f}")
    for _ in range(2):
        table.show(ROW)
    head, *lines = capsys.readouterr().out.splitlines()
    assert head == f"name   {'GB/s':>20}"
    assert lines == [f"rows   {'1235 (1000-2000)':>20}"] * 2


def test_a_page_has_bars_between_cells() -> None:
    assert markdown(["a", "b"], [["1", "2"], ["3", ""]]) == "| a | b |\n|---|---|\n| 1 | 2 |\n| 3 |  |"


def test_figures_come_back_from_json() -> None:
    row = {"us": Figure(2.0, 1.0, 3.0, 4), "other": {"median": 2.0}}
    assert json.loads(dumps(row), object_hook=with_figures) == row

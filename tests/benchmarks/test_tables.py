"""Tables of the pages, from small templates and results. The pages' own tables are held by test_record."""

from pathlib import Path

import pytest

from kvpage.benchmarks import runs, tables
from kvpage.benchmarks.cells import Row
from kvpage.benchmarks.figure import Figure

ROOT = Path(__file__).resolve().parents[2]
PAGE = "docs/page.md"


def speed(name: str) -> str:
    return f"{{tokens_per_s[{name}]:.0f}}{{wrong[{name}]}}"


TEMPLATES = f"""# Templates

## {PAGE}: numbers

| measured | median | beside | command |
|---|---|---|---|
| a step | {{us:.0f}} us | {{bound us:.0f}} us: bound; {{vllm us:.0f}} us: vLLM | pool rows[seqs=2] |
| the same of 4 | " | " | pool rows[seqs=4] |
| all | {{us:.0f}} us |  | prefix rows[*;seqs>1] |

## {PAGE}: families of {{tokens}}

| {{tokens:,}} tokens of | kvpage | generate | values |
|---|---|---|---|
| `{{family}}` | {speed("kvpage")} | {speed("generate")} | slots families[] |
"""


def figure(median: float, spread: float = 1.0) -> Figure:
    return Figure(median, median - spread, median + spread, 3)


ROWS = [
    {"seqs": 2, "us": figure(5), "bound us": figure(2), "vllm us": figure(7)},
    {"seqs": 4, "us": figure(9), "bound us": figure(3), "vllm us": None},
]


@pytest.fixture
def templates(tmp_path: Path) -> dict[tuple[str, str], tables.Template]:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / tables.TEMPLATES).write_text(TEMPLATES)
    return tables.read_templates(tmp_path)


def lines_of(template: tables.Template, **results: Row) -> list[str]:
    return template.table(results).splitlines()


def test_rows_are_beside_what_was_measured(templates) -> None:
    """Parts that a result lacks are left out, the cell of the row above is repeated, a command is shown once."""
    head, rule, *lines = lines_of(templates[PAGE, "numbers"], pool={"rows": ROWS}, prefix={"rows": ROWS})
    assert (head, rule) == ("| measured | median | beside | command |", "|---|---|---|---|")
    assert lines == [
        "| a step | 5 (4-6) us | 2 (1-3) us: bound; 7 (6-8) us: vLLM | `python benchmarks/bench_pool.py` |",
        "| the same of 4 | 9 (8-10) us | 3 (2-4) us: bound |  |",
        "| all | 5 to 9 us |  | `python benchmarks/bench_prefix.py` |",
    ]


def test_rows_without_a_result_are_left_out(templates) -> None:
    (line,) = lines_of(templates[PAGE, "numbers"], prefix={"rows": ROWS})[2:]
    assert line.startswith("| all |")
    assert all(template.table({}) == "Not measured yet." for template in templates.values())


def test_a_list_gives_a_row_each_and_says_which_tokens_are_wrong(templates) -> None:
    speeds = {"kvpage": figure(50), "generate": figure(20)}
    families = [
        {"family": "a", "tokens_per_s": speeds, "wrong": ["generate"]},
        {"family": "b", "tokens_per_s": {"kvpage": figure(30)}},
    ]
    head, _, *lines = lines_of(templates[PAGE, "families of {tokens}"], slots={"tokens": 2048, "families": families})
    assert head == "| 2,048 tokens of | kvpage | generate |"
    assert lines == ["| `a` | 50 (49-51) | 20 (19-21), wrong tokens |", "| `b` | 30 (29-31) | not run |"]


@pytest.mark.parametrize(
    ("gap", "words"), [(0.94, ", and whose tokens lie up to 0.94 below the best logit"), (0.2, "")]
)
def test_a_peers_error_is_shown_where_rounding_does_not_explain_it(gap: float, words: str) -> None:
    row = {"tokens_per_s": {"vllm": figure(1)}, "max_gap": {"vllm": gap}}
    assert tables.derived(row, {})["error"] == words
    assert tables.derived(row | {"max_rounding": 1.0}, {})["error"] == ""


def test_shares_and_the_least_time_are_derived() -> None:
    row = {"us": figure(800), "parts us": {"products": figure(200)}, "ceiling": 4.0}
    found = tables.derived(row, {"speed": [{"method": "full", "seconds": figure(8)}]})
    assert (found["shares"], found["least"]) == ({"products": 25.0}, 2.0)


@pytest.mark.skipif(not (ROOT / tables.TEMPLATES).is_file(), reason="needs the source tree")
def test_templates_name_runs_and_pages() -> None:
    for (page, _), template in tables.read_templates(ROOT).items():
        assert (ROOT / page).is_file() and {line.run for line in template.lines} <= set(runs.RUNS)

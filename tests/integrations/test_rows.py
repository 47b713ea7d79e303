"""The table of runs in docs/integrations.md, as tests/integrations/run.sh writes it."""

from pathlib import Path

import pytest
from integrations import rows

PAGE = f"# A page\n\n{rows.BEGIN}\n{rows.END}\n\nMore.\n"
RESULTS = """<testsuites><testsuite><testcase name="a"/><testcase name="b"><skipped/></testcase><testcase name="c"/>
<testcase name="d"><failure/></testcase><testcase name="e"><error/></testcase></testsuite></testsuites>"""


def test_a_row_takes_the_place_of_its_former_one():
    text = PAGE
    for name, tests in [("vllm", "1 passed"), ("sglang", "a | b"), ("vllm", "2 passed")]:
        text = rows.with_row(text, [name, "p 1", tests, "today"])
    table = [*rows.HEADING, "| sglang | p 1 | a   b | today |", "| vllm | p 1 | 2 passed | today |"]
    assert text == "\n".join(["# A page", "", rows.BEGIN, *table, rows.END, "", "More.", ""])
    with pytest.raises(ValueError, match="the page must have the lines"):
        rows.with_row("# A page", ["vllm", "", "", ""])


def test_results_are_counted_and_versions_are_those_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "results.xml").write_text(RESULTS)
    assert rows.counts(tmp_path / "results.xml") == "2 passed, 2 failed, 1 skipped"
    (tmp_path / "results.xml").write_text("<testsuites/>")
    assert rows.counts(tmp_path / "results.xml") == "none"
    assert rows.versions("pytest").startswith(f"pytest {pytest.__version__}, torch ")
    monkeypatch.setenv("NANO_VLLM", str(tmp_path))
    assert rows.versions("nano_vllm") == "sources of no commit"


def test_the_page_has_the_table():
    page = Path(__file__).parents[2] / "docs" / "integrations.md"
    if not page.is_file():
        pytest.skip("needs the source tree")
    assert rows.with_row(page.read_text(), ["a", "", "", ""]).count(rows.BEGIN) == 1

"""Figures come from this commit's sources, or are refused; the pages' tables are those that the results make."""

import subprocess
from pathlib import Path

import pytest

import kvpage
from kvpage.benchmarks import record, runs, tables
from kvpage.benchmarks.record import Refused

ROOT = Path(__file__).resolve().parents[2]
needs_sources = pytest.mark.skipif(not (ROOT / "benchmarks" / "results").is_dir(), reason="needs the source tree")


def git(root: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=n", "-c", "user.email=e"]
    subprocess.run(["git", *identity, *arguments], cwd=root, check=True, capture_output=True)


def commit(root: Path, name: str, text: str) -> str:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", name)
    return record.git(root, "rev-parse", "--short=12", "HEAD").strip()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q")
    for name in ("kvpage/a.py", "kernels/k.py", "benchmarks/b.py", "csrc/c.cpp", "CMakeLists.txt"):
        commit(tmp_path, name, name)
    return tmp_path


RUN = runs.Run("b", ("benchmarks/b.py", "--threads", "1"))


def test_a_tree_must_be_as_committed(tree: Path) -> None:
    record.check_tree(tree)
    (tree / "benchmarks" / "results").mkdir()
    (tree / "benchmarks" / "results" / "b.txt").write_text("")
    record.check_tree(tree)
    (tree / "kvpage" / "new.py").write_text("")
    with pytest.raises(Refused, match="must be as committed, these files are not: kvpage/new.py"):
        record.check_tree(tree)


@pytest.mark.parametrize("changed", ["kvpage/a.py", "csrc/c.cpp", "benchmarks/b.py", "CMakeLists.txt"])
def test_a_result_of_older_sources_is_refused(tree: Path, changed: str) -> None:
    measured_at = record.git(tree, "rev-parse", "HEAD").strip()
    commit(tree, "README.md", "of no consequence")
    record.check_result(tree, RUN, measured_at)
    commit(tree, changed, "other")
    with pytest.raises(Refused, match=f"b was measured at {measured_at}, and {changed} has changed since"):
        record.check_result(tree, RUN, measured_at)


def test_a_result_without_sources_is_of_its_commit_for_good(tree: Path) -> None:
    measured_at = record.git(tree, "rev-parse", "HEAD").strip()
    commit(tree, "kvpage/a.py", "other")
    commit(tree, "benchmarks/b.py", "other")
    record.check_result(tree, runs.Run("b", ("benchmarks/b.py",), sources=()), measured_at)


def test_a_result_of_another_history_is_refused(tree: Path) -> None:
    with pytest.raises(Refused, match="is no ancestor"):
        record.check_result(tree, RUN, "0" * 40)


def test_what_is_installed_must_be_the_tree(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    package = tmp_path_factory.mktemp("kvpage")
    for name, source in (
        ("a.py", "kvpage/a.py"),
        ("kernels/k.py", "kernels/k.py"),
        ("benchmarks/b.py", "benchmarks/b.py"),
    ):
        (package / name).parent.mkdir(exist_ok=True)
        (package / name).write_bytes((tree / source).read_bytes())
    built_from = record.digest(tree)
    record.check_installed(tree, package, built_from)
    with pytest.raises(Refused, match="the installed extension was compiled from other sources"):
        record.check_installed(tree, package, "another")
    (package / "kernels" / "k.py").write_text("other")
    with pytest.raises(Refused, match="kernels/k.py is not what is installed"):
        record.check_installed(tree, package, built_from)


def test_a_failing_benchmark_leaves_the_result(tree: Path) -> None:
    kept = tree / "benchmarks" / "results" / "b.txt"
    script = tree / "benchmarks" / "b.py"
    script.write_text("import sys; assert sys.argv[1:] == ['--plot', 'benchmarks/results/b.png', '/x/y']; print('{}')")
    record.measure(tree, runs.Run("b", ("benchmarks/b.py",)), ["/x/y"])
    text = kept.read_text()
    head = record.git(tree, "rev-parse", "--short=12", "HEAD").strip()
    assert record.read_result(tree, "b") == (head, {})
    assert "command   python -P benchmarks/b.py --plot benchmarks/results/b.png y\n" in text
    script.write_text("raise SystemExit(3)")
    with pytest.raises(Refused, match="b ended with exit code 3"):
        record.measure(tree, RUN, [])
    assert kept.read_text() == text


def test_a_table_is_put_between_its_marks() -> None:
    marks = {name: [mark.format(name) for mark in record.MARKS] for name in ("numbers", "parts")}
    old, new = ("".join(f"{a}\n{words}\n{b}\nafter\n" for a, b in marks.values()) for words in ("old", "| new |"))
    assert record.with_numbers(record.with_numbers(old, "| new |", "numbers"), "| new |", "parts") == new
    for page in ("no marks", marks["numbers"][0]):
        with pytest.raises(Refused, match="must hold the lines"):
            record.with_numbers(page, "| new |", "numbers")


@needs_sources
def test_the_extension_knows_what_it_was_compiled_from() -> None:
    """Where the tests run over what was built from this tree, as CI does."""
    assert kvpage.build_info()["sources"] == record.digest(ROOT)


def rows_of(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()[2:]]


@needs_sources
def test_short_numbers_are_in_the_full_table() -> None:
    """Each is the same number, beside the same peers or more of them."""
    results = {name: result for name, (_, result) in record.read_all(ROOT).items()}
    templates = tables.read_templates(ROOT)
    pages = ("README.md", "docs/notes/figures.md")
    short, full = (rows_of(templates[page, "numbers"].table(results)) for page in pages)
    for _, measured, beside in short:
        (peers,) = (row[2].split("; ") for row in full if row[1] == measured and beside.split("; ")[0] in row[2])
        assert set(beside.split("; ")) <= set(peers)


def test_a_run_without_a_result_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "RUNS", {"a": runs.Run("a", ("benchmarks/a.py",))})
    assert record.read_all(tmp_path) == {}
    with pytest.raises(Refused, match="a has no result: run `python benchmarks/record.py run a`"):
        record.write_numbers(tmp_path)


@needs_sources
def test_every_number_of_the_pages_is_measured() -> None:
    """The tables are made of the results that are kept, and of nothing else."""
    for name, text in record.pages_with_numbers(ROOT).items():
        assert text == (ROOT / name).read_text(), name
    assert all(result for _, result in record.read_all(ROOT).values())
    assert all((ROOT / run.arguments[0]).is_file() for run in runs.RUNS.values())

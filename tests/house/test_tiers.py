"""Which tests a plain `pytest` runs: the rule of tests/tiers.py, and what its default tier must still show."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiers
from support.gpu_cases import without_gpu_cases
from tiers import Record, tiers_of

ROOT = Path(__file__).resolve().parents[2]
CASES = [f"tests/a.py::test_many[{i}]" for i in range(10)]
GPU = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(autouse=True)
def half_a_second(monkeypatch):
    """Let the tests below count with a budget of their own."""
    monkeypatch.setattr(tiers, "BUDGET", 0.5)


def test_what_the_record_does_not_know_is_of_the_default_tier():
    assert tiers_of([*CASES, "tests/a.py::test_one"], Record(), 0) == {}


@pytest.mark.parametrize("seconds, tier", [(0.0, None), (0.99, None), (1.0, "slow")])
def test_a_test_without_cases_is_slow_when_it_takes_a_second(seconds, tier):
    record = Record(functions={"tests/a.py::test_one": seconds})
    assert tiers_of(["tests/a.py::test_one"], record, 0).get("tests/a.py::test_one") == tier


def test_cases_share_a_budget_and_every_day_draws_others():
    record = Record(functions={"tests/a.py::test_many": 2.0})
    slow = [set(tiers_of(CASES, record, seed)) for seed in range(8)]
    assert {len(cases) for cases in slow} == {8}  # two of 0.2 seconds fit
    assert len({frozenset(cases) for cases in slow}) > 1 and set.intersection(*slow) != set(CASES)
    assert slow[3] == set(tiers_of(CASES[::-1], record, 3))


def test_dear_cases_are_slow_and_leave_the_budget_to_the_others():
    record = Record({CASES[0]: 3.0, CASES[1]: 2.0}, {"tests/a.py::test_many": 5.4})
    assert set(tiers_of(CASES, record, 0)) == set(CASES[:2])


def test_the_cheapest_case_runs_where_none_fits():
    record = Record({CASES[i]: 0.6 + 0.1 * i for i in range(10)}, {"tests/a.py::test_many": 10.5})
    assert set(tiers_of(CASES, record, 0)) == set(CASES[1:])
    record = Record({case: 1.5 for case in CASES}, {"tests/a.py::test_many": 15.0})
    assert set(tiers_of(CASES, record, 0)) == set(CASES)


def test_a_function_that_shows_a_promise_has_a_budget_of_its_own(monkeypatch):
    monkeypatch.setattr(tiers, "SHOWN", {"a promise": {"tests/a.py::test_many": 3.0}})
    assert len(tiers_of(CASES, Record(functions={"tests/a.py::test_many": 4.0}), 0)) == 3


def test_files_and_functions_may_be_of_one_tier(monkeypatch):
    monkeypatch.setattr(tiers, "WHOLE", {"tests/a.py": "nightly", "tests/b.py::test_b": "slow"})
    cases = [CASES[0], "tests/b.py::test_b[x]", "tests/b.py::test_c"]
    assert tiers_of(cases, Record(), 0) == {CASES[0]: "nightly", "tests/b.py::test_b[x]": "slow"}


def test_a_run_renews_the_seconds_of_its_functions_alone(tmp_path):
    record = Record(
        {CASES[0]: 3.0, "tests/b.py::test_b": 2.0}, {"tests/a.py::test_many": 5.4, "tests/b.py::test_b": 2.0}
    )
    record.add({CASES[1]: 0.5, CASES[2]: 0.1})
    record.write(tmp_path / "record.json")
    read = Record.read(tmp_path / "record.json")
    assert read.cases == {CASES[1]: 0.5, "tests/b.py::test_b": 2.0}
    assert read.functions == {"tests/a.py::test_many": 0.6, "tests/b.py::test_b": 2.0}


def test_no_record_is_an_empty_one(tmp_path):
    assert Record.read(tmp_path / "none.json") == Record()


@pytest.mark.parametrize("case, seconds, may_end", [("known", 5.9, False), ("known", 6.1, True), ("other", 3.1, True)])
def test_a_test_may_take_thrice_its_seconds(monkeypatch, case, seconds, may_end):
    monkeypatch.setattr(tiers, "recorded", lambda: Record({"known": 2.0}))
    assert tiers.may_end(case, seconds) == may_end


@pytest.mark.parametrize("arguments, is_recording, expression", [
    (["tests"], False, tiers.DEFAULT),
    (["tests/blocks", "tests/a.py"], False, tiers.DEFAULT),
    (["tests/a.py", "tests/b.py::test_b"], False, "not nightly"),
    (["tests/a.py::test_many", "tests/b.py::test_b[1]"], False, ""),
    (["tests"], True, "not nightly"),
])  # fmt: skip
def test_what_is_named_runs(arguments, is_recording, expression):
    assert tiers.expression_for(arguments, is_recording) == expression


def parametrized(*values, **options):
    return pytest.mark.parametrize("where", list(values), **options).mark


def test_cases_of_a_gpu_are_not_made_where_none_is():
    (mark,) = without_gpu_cases([parametrized("cpu", GPU, ids=["a", "b"])], is_whole=False)
    assert mark.args == ("where", ["cpu"]) and mark.kwargs == {"ids": ["a"]}
    untouched = [parametrized("cpu", "meta"), pytest.mark.slow.mark]
    assert without_gpu_cases(untouched, is_whole=False) == untouched


@pytest.mark.parametrize("marks, is_whole", [([parametrized(GPU), parametrized(1, 2)], False),
                                             ([parametrized(1, 2), pytest.mark.gpu.mark], False),
                                             ([parametrized(1, 2)], True)])  # fmt: skip
def test_a_test_that_needs_a_gpu_is_one_test(marks, is_whole):
    assert [mark.name for mark in without_gpu_cases(marks, is_whole)] == ["gpu"]


def functions_in(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("name", sorted({*tiers.WHOLE, *(name for names in tiers.SHOWN.values() for name in names)}))
def test_what_the_rule_names_is_there(name):
    path, _, function = name.partition("::")
    assert (ROOT / path).exists() and (not function or function in functions_in(ROOT / path))


PROMISES = {  # which the default tier shows, whatever a later record says
    "every public name is called",
    "tokens are the model's own",
    "trees, managers, stores and tiers are their oracles",
    "a changed record is a miss",
    "a refused call changes nothing",
    "a client is served over HTTP",
    "the import is light, and the pages' examples run",
    "each kernel is the reference, by the interpreter",
    "each kind of kernel is the reference, as it is compiled",
}
MOST_SHOWN = 270  # CPU seconds of all of them together


def test_each_promise_has_tests_in_the_default_tier():
    assert tiers.SHOWN.keys() >= PROMISES and all(tiers.SHOWN.values())
    assert sum(seconds for functions in tiers.SHOWN.values() for seconds in functions.values()) <= MOST_SHOWN


@pytest.mark.parametrize("function", sorted(name for names in tiers.SHOWN.values() for name in names))
def test_a_budget_pays_the_dearest_case_of_what_is_shown(function):
    cases = {case: s for case, s in tiers.recorded().cases.items() if tiers.function_of(case) == function}
    assert tiers.whole_tier(function) is None
    assert max(cases.values(), default=0.0) <= tiers.budget_of(function), max(cases, key=cases.__getitem__)


def test_processes_of_a_run_do_as_its_command_line_says():
    """A named file's slow tests run in them, and their time is not over."""
    pytest_script = Path(sys.executable).with_name("pytest")
    name = "test_a_missing_extra_is_named"
    command = [pytest_script, "-q", "-n", "1", "--time-limit=900", "tests/serving/test_telemetry.py", "-k", name]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}  # of this run's own
    done = subprocess.run(command, cwd=ROOT, env=clean, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and " passed" in done.stdout and "skipped" not in done.stdout, done.stdout

"""Tiers: which tests a plain `pytest` runs, and which wait for `slow` and `nightly` runs.

    seconds of each case, recorded ─► recorded_seconds.json ─┐
    BUDGET, or more by SHOWN ────────────────────────────────┼─► the cases that the budget pays: default; others: slow
    the seed of the day: an order of the cases ──────────────┘
    WHOLE: files and functions that are of one tier ──────────► slow, nightly

A function's cases share one budget of CPU seconds. A function whose cases cost more is sampled: every day draws other
cases. A function that the record does not know is in the default tier. SHOWN gives more to the functions on which a
promise rests; tests/house/test_tiers.py holds that the default tier keeps them.
"""

import datetime
import functools
import json
import os
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

RECORD = Path(__file__).with_name("recorded_seconds.json")
SEED = "KVPAGE_TEST_SEED"
TIERS = ("slow", "nightly")  # besides the default one
DEFAULT = "not slow and not nightly"  # as in pyproject.toml
SECONDS = "cpu_seconds"  # the property of a report
BUDGET = 1.0  # CPU seconds of one function in the default tier
LISTED = 0.25  # the record names cases and functions from this many seconds on

# Files and functions whose tier no record decides, since what they cost is not in their calls.
WHOLE: dict[str, str] = {
    "tests/ops/test_swap_calls.py": "slow",  # nvcc compiles a module for its fixture
}

# What the default tier must show, by functions with the CPU seconds that they may take.
SHOWN: dict[str, dict[str, float]] = {}


def function_of(case: str) -> str:
    """Return the function's name in the name of a case: `tests/a.py::test_b` of `tests/a.py::test_b[1-x]`."""
    return case.split("[", 1)[0]


def seed_of_day() -> int:
    """Return the seed that KVPAGE_TEST_SEED gives, else today's date as a number, such as 20261128."""
    return int(os.environ.get(SEED) or datetime.date.today().strftime("%Y%m%d"))


def budget_of(function: str) -> float:
    """Return the CPU seconds that the default tier has for all cases of a function together."""
    return max((functions[function] for functions in SHOWN.values() if function in functions), default=BUDGET)


def whole_tier(function: str) -> str | None:
    """Return the tier that WHOLE names for a function or its file."""
    return WHOLE.get(function) or WHOLE.get(function.split("::", 1)[0])


@dataclass(slots=True)
class Record:
    """CPU seconds of calls. cases: of the dear cases, by name. functions: of all cases together, by function."""

    cases: dict[str, float] = field(default_factory=dict)
    functions: dict[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path = RECORD) -> "Record":
        return cls(**json.loads(path.read_text())) if path.exists() else cls()

    def write(self, path: Path = RECORD) -> None:
        columns = {"cases": self.cases, "functions": self.functions}
        listed = {name: {key: round(seconds, 2) for key, seconds in sorted(column.items()) if seconds >= LISTED}
                  for name, column in columns.items()}  # fmt: skip
        path.write_text(json.dumps(listed, indent=0) + "\n")

    def add(self, measured: dict[str, float]) -> None:
        """Take the seconds of a run for those of its functions. A function that did not run keeps its seconds."""
        functions = {function_of(case) for case in measured}
        self.cases = {case: s for case, s in self.cases.items() if function_of(case) not in functions} | measured
        totals = dict.fromkeys(functions, 0.0)
        for case, seconds in measured.items():
            totals[function_of(case)] += seconds
        self.functions |= totals

    def seconds_of(self, function: str, cases: Iterable[str]) -> dict[str, float]:
        """Return the seconds of each case. Cases that have no record of their own share the rest of the function's."""
        known = {case: self.cases.get(case) for case in cases}
        rest = self.functions.get(function, 0.0) - sum(seconds or 0.0 for seconds in known.values())
        share = max(rest, 0.0) / max(1, sum(seconds is None for seconds in known.values()))
        return {case: share if seconds is None else seconds for case, seconds in known.items()}

    def default_cases(self, function: str, cases: Iterable[str], seed: int) -> set[str]:
        """Return the cases of a function that the default tier runs on the day of `seed`."""
        seconds = self.seconds_of(function, cases)
        order = sorted(seconds)
        random.Random(f"{seed} {function}").shuffle(order)
        left, chosen = budget_of(function), set()
        for case in order:
            if seconds[case] <= left:
                left -= seconds[case]
                chosen.add(case)
        return chosen


def tiers_of(cases: Iterable[str], record: Record, seed: int) -> dict[str, str]:
    """Return the tier of each case that is not in the default one: `slow` or `nightly`. `cases`: of whole functions."""
    by_function: dict[str, list[str]] = {}
    for case in cases:
        by_function.setdefault(function_of(case), []).append(case)
    tiers = {}
    for function, group in by_function.items():
        whole = whole_tier(function)
        default = set() if whole else record.default_cases(function, group, seed)
        tiers |= {case: whole or "slow" for case in group if case not in default}
    return tiers


class Recording:
    """A plugin that writes the seconds of a run's tests to the record."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self.seconds[report.nodeid] = float(dict(report.user_properties)[SECONDS])

    def pytest_sessionfinish(self) -> None:
        record = Record.read()
        record.add(self.seconds)
        record.write()


def may_end(case: str, seconds: float) -> bool:
    """Whether a test may be begun with so many seconds left: a slow machine takes thrice those of the record."""
    return 3 * recorded().cases.get(case, 1.0) <= seconds


@functools.cache
def recorded() -> Record:
    return Record.read()

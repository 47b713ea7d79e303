"""The order in which .ci/run tries slow tests, and the line that tells how they ended."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / ".ci" / "slow_tests.py"
pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="needs the source tree")
OUTPUT = """
SKIPPED [1] tests/a.py:3: needs nvcc
SKIPPED [7] tests/conftest.py:150: the time of this run is over
FAILED tests/b.py::test_b - assert 3 passed in this
1 failed, 12 passed, 8 skipped, 2 errors in 71.20s (0:01:11)
"""


@pytest.fixture(scope="module")
def slow_tests():
    path = list(sys.path)
    spec = importlib.util.spec_from_file_location("slow_tests", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path[:] = path
    return module


def test_files_are_as_far_as_the_fewest_arrows(slow_tests):
    importers = {"a": {"b", "c"}, "b": {"d"}, "c": {"d"}, "d": {"a", "e"}}
    assert slow_tests.distances(["a"], importers) == {"a": 0, "b": 1, "c": 1, "d": 2, "e": 3}
    assert slow_tests.distances([], importers) == {}


def test_what_is_near_a_change_comes_first_then_what_is_quick(slow_tests):
    slow, distance = {"x": 5.0, "y": 1.0, "z": 9.0, "w": 2.0}, {"z": 1, "x": 2, "w": 2}
    assert slow_tests.in_order(slow, distance) == ["z", "w", "x", "y"]


@pytest.mark.parametrize("module, paths", [
    ("kvpage.blocks.manager", {"kvpage/blocks/manager.py"}),
    ("kvpage.kernels.reshape", {"kernels/reshape.py"}),
    ("kvpage._C", {"csrc"}),
    ("support.oracle", {"tests/support/oracle.py"}),
    ("batteries", {"tests/reliability/batteries.py"}),
    ("kvpage.blocks", {"kvpage/blocks/__init__.py"}),
    ("numpy", set()),
])  # fmt: skip
def test_imports_are_files_of_the_project(slow_tests, module, paths):
    files = {"kvpage/blocks/manager.py", "kvpage/blocks/__init__.py", "kernels/reshape.py", "tests/support/oracle.py",
             "tests/reliability/batteries.py"}  # fmt: skip
    assert set(slow_tests.file_of(module, files)) == paths


def test_a_file_says_what_it_imports(slow_tests):
    files = {"tests/tiers.py", "tests/support/gpu_cases.py"}
    assert set(slow_tests.imported("tests/house/test_tiers.py", files)) == files


def test_the_closing_line_counts(slow_tests):
    said = slow_tests.summary(OUTPUT, 71.4)
    assert said == "slow tests: 12 pass, 3 fail, 1 cannot run here, 7 had no time; 71 seconds"
    assert slow_tests.summary("", 0).startswith("slow tests: 0 pass, 0 fail")

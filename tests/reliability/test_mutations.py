"""The tool that tries mutants, on samples: it finds the places, puts the mutants there, and tells who is noticed."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import native_build
import pytest
from mutation.cpp_sites import instrumented
from mutation.explained import FILE, Explained
from mutation.mutant import Mutant, numbered
from mutation.python_mutants import PythonMutants, source_at
from mutation.suites import SUITES

HERE = Path(__file__).parent
SAMPLE = '''
from door import Door
LIMIT = 3


class Gate(Door):
    def __init__(self, num_open=0):
        super().__init__()
        self.num_open = num_open

    def enter(self, count, *, is_forced=False):
        """Counts, and says how many are in."""
        if count < 1:
            raise ValueError(f"count must be positive, got {count - 0}")
        if self.num_open + count > LIMIT and not is_forced:
            return False
        self.num_open += count
        return True
'''
DOOR = """
class Door:
    has_bell = False

    def __init__(self):
        self.has_bell = True
"""
TESTS = """
import gc

import pytest
from gate import Gate

gc.freeze()  # as conftest.py does: a mutant finds its function among frozen objects, too

def test_limit():
    gate = Gate()
    assert gate.has_bell
    assert gate.enter(3) is True and gate.num_open == 3
    assert gate.enter(1) is False and gate.num_open == 3
    assert gate.enter(1, is_forced=True) is True and gate.num_open == 4

@pytest.mark.parametrize("count", range(-5, 1))
def test_counts(count):
    with pytest.raises(ValueError, match="count must be positive"):
        Gate().enter(count)
"""
RUN = """
import json, sys
sys.path[:0] = [sys.argv[1], "."]
import pytest
from pathlib import Path
from mutation.mutation_run import MutationRun
from mutation.python_mutants import PythonMutants
mutants = PythonMutants(["gate.py"], Path.cwd())
run = MutationRun(mutants, list(range(len(mutants.mutants))), lambda *told: None, 2, 60.0)
pytest.main(["-s", "-p", "no:terminal", "-p", "no:cacheprovider", "test_gate.py"], plugins=[run])
print(json.dumps([[str(mutants.mutants[index]), killer] for index, killer in run.killed_by.items()]))
"""
CPP = """
#include <cstdint>
#include <cstdio>

int64_t sum_below(int64_t limit, bool is_odd) {
  int64_t sum = 0;
  for (int64_t i = 0; i < limit; ++i) {
    if (!is_odd || i % 2 == 1) sum += i;
  }
  return sum;
}

int main() {
  // "a < b" in a comment, and below in a string
  const bool holds = sum_below(5, false) == 10 && sum_below(5, true) == 4;
  std::puts(holds ? "1 < 2" : "2 < 1");
  return holds ? 0 : 1;
}
"""


def test_python_mutants_are_noticed_or_not(tmp_path):
    (tmp_path / "door.py").write_text(DOOR)
    (tmp_path / "gate.py").write_text(SAMPLE)
    (tmp_path / "test_gate.py").write_text(TESTS)
    command = [sys.executable, "-c", RUN, str(HERE)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    killed_by = dict(json.loads(done.stdout.splitlines()[-1]))
    assert len(killed_by) > 20
    left = [name.removeprefix("gate.py:") for name, killer in killed_by.items() if not killer]
    assert left == [], killed_by
    assert {killer for killer in killed_by.values()} <= {
        "test_gate.py::test_limit",
        *(f"test_gate.py::test_counts[{count}]" for count in range(-5, 1)),
    }
    assert not [name for name in killed_by if "- 0" in name and "becomes" in name], "messages are left alone"


@pytest.mark.skipif(native_build.missing() is not None, reason=str(native_build.missing()))
def test_native_mutants_are_noticed_or_not(tmp_path):
    text, changes = instrumented(CPP, 0)
    (tmp_path / "sample.cpp").write_text(text)
    program, mutation = tmp_path / "sample", HERE / "mutation"
    command = [native_build.compiler(), "-std=c++20", "-w", "-Wno-narrowing", f"-I{mutation}", "-o", str(program)]
    subprocess.run([*command, str(tmp_path / "sample.cpp"), str(mutation / "mutants.cpp")], check=True)
    left = []
    for index, (line, change) in enumerate(changes):
        command = ["sh", "-c", 'ulimit -t 2 && exec "$0"', program]  # seconds of the processor: some do not end
        if subprocess.run(command, env={"KVPAGE_MUTANT": str(index)}, capture_output=True).returncode == 0:
            left.append((line, change))
    assert subprocess.run([program], capture_output=True, text=True, env={}).stdout == "1 < 2\n"
    of_the_function = [(line, change) for line, change in left if line < 12]
    assert len(changes) > 25 and of_the_function == [(7, "0 becomes 1")], left  # which adds 0 less


def test_modules_that_a_checkout_has_beside_the_package_are_followed():
    mutants = PythonMutants(["kvpage/layout/config.py", "kvpage/kernels/prepared.py"])
    pytest.importorskip("triton")
    module = importlib.import_module("kvpage.kernels.prepared")
    if Path(module.__file__).resolve() != Path(__file__).parents[2] / "kernels" / "prepared.py":
        pytest.skip("needs the checkout to be what is installed, as the tool does")
    kinds = module.PreparedKinds(capacity=1)
    mutants.begin()
    kinds.keep(0, "kind")
    assert {mutants.mutants[index].path for index in mutants.reached()} == {"kvpage/kernels/prepared.py"}


def test_the_same_change_twice_in_a_line_has_two_names():
    one = Mutant("a.py", 3, "f", "x + y + z", "+ becomes -")
    names = [mutant.change for mutant in numbered([one, one, Mutant("a.py", 4, "f", "u + v", "+ becomes -")])]
    assert names == ["+ becomes -", "+ becomes - (2)", "+ becomes -"]


@pytest.mark.parametrize("path", SUITES)
def test_every_explanation_is_of_a_mutant_of_today(path, tmp_path):
    if path.endswith(".py"):
        mutants = PythonMutants([path]).mutants
    else:
        pytest.importorskip("pybind11")
        mutants = importlib.import_module("mutation.native_mutants").NativeMutants([path], tmp_path).mutants
    assert Explained.read().unknown(mutants) == []
    assert all(entry["file"] in SUITES for entry in json.loads(FILE.read_text()))


def test_the_files_that_are_named_exist():
    explained = {entry["file"] for entry in json.loads(FILE.read_text())}
    suites = {test for tests in SUITES.values() for test in tests}
    root = HERE.parents[1]
    assert [path for path in sorted(explained | set(SUITES) | suites) if not source_at(path, root).is_file()] == []


@pytest.mark.parametrize("entry", [{}, {"file": "a", "function": "f", "line": "x", "change": "y", "why": ""}])
def test_an_explanation_needs_a_reason(entry):
    with pytest.raises(ValueError, match="an entry must have file, function, line, change and why"):
        Explained([entry])

"""A run of all tests is spread over processes; part of them runs in one."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).resolve().parents[1]
MODULE = """
import os

import pytest
import torch

@pytest.mark.parametrize("index", range(8))
def test_where(index):
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    print(f"process {count} {torch.get_num_threads()}")
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a project with the conftest of this one and tests that print the processes and threads that they have."""
    for name in ("conftest.py", "tiers.py", "support/gpu_cases.py", "support/seeds.py"):
        (tmp_path / "tests" / name).parent.mkdir(exist_ok=True)
        shutil.copy(TESTS / name, tmp_path / "tests" / name)
    (tmp_path / "tests" / "test_some.py").write_text(MODULE)
    options = ["testpaths = tests", "pythonpath = tests", "addopts = -rP --strict-markers"]
    (tmp_path / "pytest.ini").write_text(
        "\n".join(["[pytest]", *options, "markers =", " gpu", " slow", " nightly", ""])
    )
    return tmp_path


def places(project: Path, *arguments: str) -> set[tuple[int, int]]:
    """Return the numbers of processes and of threads in each that the tests of a run have seen."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")} | {
        "OMP_NUM_THREADS": "4"
    }
    command = [sys.executable, "-m", "pytest", *arguments]
    done = subprocess.run(command, cwd=project, env=env, text=True, capture_output=True)
    assert "8 passed" in done.stdout, done.stdout + done.stderr
    printed = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("process ")]
    return {(int(processes), int(threads)) for processes, threads in printed}


@pytest.mark.skipif(torch.cuda.is_available(), reason="one process runs the tests where there is a GPU")
def test_all_tests_run_in_up_to_four_processes_and_part_of_them_in_one(project):
    pytest.importorskip("xdist")
    ((one, num_threads),) = places(project, "tests/test_some.py")
    num_processes = min(len(os.sched_getaffinity(0)), 4)
    assert one == 1
    assert places(project) == {(num_processes, max(1, num_threads // num_processes))}


def test_the_command_line_decides(project):
    pytest.importorskip("xdist")
    ((num_processes, _),) = places(project, "-n", "3")
    assert num_processes == 3

"""Fixtures and hooks of all tests: seeds, several processes, and the one place that skips tests of a GPU."""

import os
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parent
MAX_PROCESSES = 4  # each holds a torch of its own, and threads of its own


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Spread a run of all tests over several processes, as `-n` and `--dist` of pytest-xdist do.

    A `-n` on the command line wins. One process runs part of the tests: it starts sooner. So it does where tests use a
    GPU, of which they measure the memory.
    """
    option = config.option
    if "PYTEST_XDIST_WORKER" in os.environ or getattr(option, "numprocesses", 0) is not None:
        return
    watched = option.usepdb or option.collectonly or option.capture == "no"
    num_processes = min(len(os.sched_getaffinity(0)), MAX_PROCESSES)
    if runs_all_tests(config) and num_processes > 1 and not watched and not torch.cuda.is_available():
        option.numprocesses = num_processes
        option.dist = "worksteal"


def runs_all_tests(config: pytest.Config) -> bool:
    return [config.invocation_params.dir / argument for argument in config.args] == [TESTS]


def pytest_configure() -> None:
    """Leave the processors to the processes of the run in equal parts. Compiled models need few of torch's headers."""
    os.environ.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")
    num_processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if num_processes > 1:
        torch.set_num_threads(max(1, torch.get_num_threads() // num_processes))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)

"""Fixtures and hooks of all tests: tiers, seeds, several processes, and the one place that skips tests of a GPU."""

import gc
import inspect
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiers
import torch
from support.gpu_cases import without_gpu_cases
from support.seeds import VARIABLE, replay, todays_seed

TESTS = Path(__file__).parent
MAX_PROCESSES = 4  # each holds a torch of its own, and threads of its own
DECIDED = "decided"
LEFT_OUT = pytest.StashKey[Counter[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tiers")
    group.addoption("--record-seconds", action="store_true", help=f"write the CPU seconds of tests to {tiers.RECORD}")
    group.addoption("--cases-each", type=int, help="run at most so many cases of each test, which the seed chooses")
    group.addoption("--time-limit", type=float, help="seconds; tests that may not end within them are skipped")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Decide once for all processes of a run: the tier, the seed of the day, when time is over, how many they are."""
    if hasattr(config, "workerinput"):
        vars(config.option).update(config.workerinput[DECIDED])
        return
    heed_interrupts()
    os.environ[VARIABLE] = str(todays_seed())
    option = config.option
    if option.time_limit is not None:
        option.time_limit += time.time()
    if option.markexpr == tiers.DEFAULT and not any(str(arg).startswith("-m") for arg in config.invocation_params.args):
        option.markexpr = tiers.expression_for(config.args, option.record_seconds)
    spread(config)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a process of pytest-xdist what is decided: it reads the command line anew."""
    node.workerinput[DECIDED] = {name: getattr(node.config.option, name) for name in ("markexpr", "time_limit")}


def heed_interrupts() -> None:
    """Take signals as a program in a terminal does. In the background of a shell they are ignored, also by children."""
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, handler)


def spread(config: pytest.Config) -> None:
    """Spread a run of all tests over several processes, as `-n` and `--dist` of pytest-xdist do.

    A `-n` on the command line wins. One process runs part of the tests: it starts sooner. So it does where tests use a
    GPU, of which they measure the memory.
    """
    option = config.option
    if getattr(option, "numprocesses", 0) is not None or "PYTEST_XDIST_WORKER" in os.environ:
        return
    watched = option.usepdb or option.collectonly or option.capture == "no"
    num_processes = min(len(os.sched_getaffinity(0)), MAX_PROCESSES)
    if runs_all_tests(config) and num_processes > 1 and not watched and not torch.cuda.is_available():
        option.numprocesses = num_processes
        option.dist = "worksteal"


def runs_all_tests(config: pytest.Config) -> bool:
    return [config.invocation_params.dir / argument for argument in config.args] == [TESTS]


def pytest_configure(config: pytest.Config) -> None:
    """Leave the processors to the processes of the run in equal parts. Compiled models need few of torch's headers."""
    config.stash[LEFT_OUT] = Counter()
    if config.option.record_seconds and not hasattr(config, "workerinput"):
        config.pluginmanager.register(tiers.Recording())
    os.environ.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")
    num_processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if num_processes > 1:
        torch.set_num_threads(max(1, torch.get_num_threads() // num_processes))


def pytest_report_header() -> str:
    return f"random tests: {replay()} repeats them"


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Module | pytest.Class, obj: object) -> None:
    """Make no cases of a GPU where none is."""
    if inspect.isfunction(obj) and not torch.cuda.is_available():
        marks, is_whole = getattr(obj, "pytestmark", []), collector.get_closest_marker("gpu") is not None
        if marks or is_whole:
            obj.pytestmark = without_gpu_cases(marks, is_whole)  # type: ignore[attr-defined]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Collect without looking for garbage: all that is made stays until the end, which takes a fifth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Mark the tests that are not of the default tier, and skip those of a GPU where none is. Then draw, after `-k`."""
    tier_of = tiers.tiers_of([item.nodeid for item in items], tiers.Record.read(), todays_seed())
    for item in items:
        if item.nodeid in tier_of:
            item.add_marker(tier_of[item.nodeid])
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    yield
    if config.option.cases_each is not None:
        drawn = tiers.draw([item.nodeid for item in items], config.option.cases_each, todays_seed())
        items[:] = [item for item in items if item.nodeid in drawn]


def pytest_deselected(items: list[pytest.Item]) -> None:
    for item in items:
        item.config.stash[LEFT_OUT].update(tier for tier in tiers.TIERS if item.get_closest_marker(tier))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = dict(session.config.stash[LEFT_OUT])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: pytest.Session) -> None:
    """Take from a process of pytest-xdist how many tests it left out: all processes collect the same."""
    node.config.stash[LEFT_OUT] = Counter(getattr(node, "workeroutput", {}).get("left_out", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    left_out = config.stash[LEFT_OUT]
    if left_out:
        counts = " and ".join(f"{left_out[tier]:,} {tier} tests" for tier in tiers.TIERS if left_out[tier])
        terminalreporter.write_line(f"left out: {counts}. `pytest -m ''` runs all; {replay()} leaves out the same")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    limit = item.config.option.time_limit
    if limit is not None and not tiers.may_end(item.nodeid, limit - time.time()):
        pytest.skip("the time of this run is over")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Take the CPU seconds of the call, with those of its child processes."""
    before = sum(os.times()[:4])
    try:
        return (yield)
    finally:
        item.user_properties.append((tiers.SECONDS, sum(os.times()[:4]) - before))


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)

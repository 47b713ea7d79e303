"""MutationRun: tests, each mutant in a forked process of its own, those tests only that reach it.

pytest collects ─► a process runs all tests once: which mutants does each reach? ─► for each mutant a process:
                                                                  the tests that reach it, the quickest first
"""

import os
import pickle
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Protocol

import pytest

from mutation.mutant import Mutant

NOT_APPLIED, CRASHED, ENDLESS = 252, 253, 254
MEMORY_BYTES = 4 << 30  # that a mutant may take
LEAST_SECONDS = 10.0  # before it counts as one that does not end
POLL_SECONDS = 0.005


class Mutants(Protocol):
    """Those of some files, and how this process gets one of them."""

    mutants: list[Mutant]

    def begin(self) -> None: ...
    def reached(self) -> list[int]: ...
    def apply(self, index: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Reach:
    """Of one test: its place in the session, how long the processor takes for it, the mutants that it reaches."""

    item: int
    seconds: float
    mutants: frozenset[int]


class MutationRun:
    """A plugin of pytest. indices: of the mutants to be tried. `killed_by`: for each the test's name, or None; a mutant
    that no test reaches has "" there. num_cases: of each test with parameters. seconds: of tests that a
    mutant is tried with.
    """

    def __init__(
        self,
        mutants: Mutants,
        indices: list[int],
        advance: Callable[[int, str | None], object],
        num_cases: int,
        seconds: float,
    ) -> None:
        self.mutants, self.indices, self.advance = mutants, indices, advance
        self.num_cases, self.seconds = num_cases, seconds
        self.killed_by: dict[int, str | None] = {}
        self._failed: str | None = None
        self._killers: dict[int, int] = {}  # of an item, how many it has killed

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        by_test: dict[str, list[pytest.Item]] = {}
        for item in items:
            by_test.setdefault(item.nodeid.split("[")[0], []).append(item)
        items[:] = [item for cases in by_test.values() for item in _spread(cases, self.num_cases)]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            raise session.Interrupted("tests could not be collected")
        reaches = self._reaches(session)
        for index in self.indices:
            found = [reach for reach in reaches if index in reach.mutants]
            found.sort(key=self._rank)
            self.killed_by[index] = self._killer(session, index, found) if found else ""
            self.advance(index, self.killed_by[index])
        return True

    def _rank(self, reach: Reach) -> tuple[bool, float]:
        """Quick tests that have noticed a mutant come first, then the others, the quickest first."""
        return not (reach.item in self._killers and reach.seconds < 1), reach.seconds

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed = report.nodeid

    def _reaches(self, session: pytest.Session) -> list[Reach]:
        """All tests in one process, without mutants. RuntimeError if one fails."""
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder) / "reaches"
            code = _in_fork(lambda: self._record(session, place), None)
            if code != 0:
                found = place.read_text() if place.exists() else f"ended with {code}"
                raise RuntimeError(f"the tests must pass without mutants: {found}")
            reaches: list[Reach] = pickle.loads(place.read_bytes())
            return reaches

    def _record(self, session: pytest.Session, place: Path) -> int:
        reaches = []
        for number, item in enumerate(session.items):
            began = time.process_time()
            self.mutants.begin()
            self._run_item(session.items, number)
            reaches.append(Reach(number, time.process_time() - began, frozenset(self.mutants.reached())))
            if self._failed:
                place.write_text(item.nodeid)
                return 1
        place.write_bytes(pickle.dumps(reaches))
        return 0

    def _killer(self, session: pytest.Session, index: int, reaches: list[Reach]) -> str | None:
        reaches = self._within_time(reaches)

        def run() -> int:
            try:
                self.mutants.apply(index)
            except Exception:
                traceback.print_exc()
                return NOT_APPLIED
            items = [session.items[reach.item] for reach in reaches]
            for number in range(len(items)):
                self._run_item(items, number)
                if self._failed:
                    return min(number + 1, 250)
            return 0

        code = _in_fork(run, LEAST_SECONDS + 4 * sum(reach.seconds for reach in reaches))
        if code in (ENDLESS, -signal.SIGXCPU):
            return "it does not end"
        if code == 0:
            return None
        if code == NOT_APPLIED:
            raise RuntimeError(f"{self.mutants.mutants[index]} cannot be applied")
        if not 0 < code <= min(len(reaches), 250):
            return "it ends in a crash"
        item = reaches[code - 1].item
        self._killers[item] = self._killers.get(item, 0) + 1
        return str(session.items[item].nodeid)

    def _within_time(self, reaches: list[Reach]) -> list[Reach]:
        total, kept = 0.0, []
        for reach in reaches:
            total += reach.seconds
            if total > self.seconds and kept:
                break
            kept.append(reach)
        return kept

    def _run_item(self, items: list[pytest.Item], number: int) -> None:
        following = items[number + 1] if number + 1 < len(items) else None
        items[number].config.hook.pytest_runtest_protocol(item=items[number], nextitem=following)


def _spread(cases: list[pytest.Item], num: int) -> list[pytest.Item]:
    """At most that many, the first and the last among them."""
    if len(cases) <= num:
        return cases
    return [cases[i * (len(cases) - 1) // max(num - 1, 1)] for i in range(num)]


def _in_fork(run: Callable[[], int], seconds: float | None) -> int:
    """What `run` returns in a process of its own, silent; another number if it crashes, or ENDLESS: after so many
    seconds of the processor, or ten times as many asleep. A busy machine does not count as either.
    """
    child = os.fork()
    if child == 0:
        _as_child(run, seconds)
    asleep = 0.0
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            _kill_group(child)
            return os.waitstatus_to_exitcode(status)
        if seconds is not None and asleep > 10 * seconds:
            _kill_group(child)
            os.waitpid(child, 0)
            return ENDLESS
        time.sleep(POLL_SECONDS)
        asleep += POLL_SECONDS * _is_asleep(child)


def _is_asleep(process: int) -> bool:
    """Whether all threads wait for something else than a processor."""
    try:
        stats = [thread.read_text() for thread in Path(f"/proc/{process}/task").glob("*/stat")]
    except (FileNotFoundError, ProcessLookupError):  # a thread has ended meanwhile
        return False
    return all(stat.rpartition(")")[2].split()[0] == "S" for stat in stats)


def _as_child(run: Callable[[], int], seconds: float | None) -> NoReturn:
    code = CRASHED
    try:
        os.setpgid(0, 0)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES,) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if seconds is not None:
            used_seconds = int(time.process_time()) + 1
            resource.setrlimit(resource.RLIMIT_CPU, (used_seconds + int(seconds), resource.RLIM_INFINITY))
        silent = os.open(os.devnull, os.O_RDWR)
        for place in (0, 1, 2):
            os.dup2(silent, place)
        code = run()
    finally:
        sys.stdout.flush()
        os._exit(code)


def _kill_group(process: int) -> None:
    try:
        os.killpg(process, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return

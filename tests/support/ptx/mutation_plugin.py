"""A plugin of pytest (-p support.ptx.mutation_plugin): runs each test again with mutants of the kernels that it runs.

A mutant is one instruction of one kernel, changed. A test that passes with it has not found it. The last lines of the
output name those, and say how many were found.
"""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from _pytest.runner import runtestprotocol
from support.ptx import device, kernel
from support.ptx.machine import execution
from support.ptx.mutants import mutants_of
from support.ptx.source.program import Entry, Instruction

MAX_RUNS = 2**13  # of a mutant: it may never end


@dataclass(frozen=True, slots=True)
class Mutant:
    """What is done to the instruction at a place of an entry of this text."""

    text: str
    place: int
    what: str
    changed: Instruction


@dataclass
class Mutation:
    """seen: entries that the test ran. run: numbers the runs, as a kernel is built anew for each."""

    rng: random.Random
    count: int
    mutant: Mutant | None = None
    run: int = 0
    seen: dict[str, Entry] = field(default_factory=dict)
    figures: Counter[tuple[str, bool]] = field(default_factory=Counter)
    missed: list[str] = field(default_factory=list)

    def parse(self, original: Any, ptx: str, name: str | None) -> Entry:
        entry = original(ptx, name)
        text = f"{name}{ptx}"
        if self.mutant is None:
            self.seen[text] = entry
        elif self.mutant.text == text:
            entry.instructions[self.mutant.place] = self.mutant.changed
        return entry

    def mutants(self) -> list[Mutant]:
        """Choose some, of each kernel as many as of another."""
        chosen: list[Mutant] = []
        for text, entry in self.seen.items():
            every = [
                Mutant(text, place, what, changed)
                for place, instruction in enumerate(entry.instructions)
                for what, changed in mutants_of(instruction)
            ]
            chosen += self.rng.sample(every, min(len(every), -(-self.count // len(self.seen))))
        return chosen

    def repeat(self, item: pytest.Item, following: pytest.Item | None) -> None:
        """Run a test as it is, then with each mutant."""
        self.mutant, self.seen = None, {}
        if self.fails(item, following):
            raise pytest.UsageError(f"{item.nodeid} fails without a mutant")
        for mutant in self.mutants():
            self.mutant = mutant
            found, name = self.fails(item, following), self.seen[mutant.text].name
            self.figures[name, found] += 1
            if not found:
                before = self.seen[mutant.text].instructions[mutant.place]
                self.missed.append(f"{item.name}: {mutant.what}: {before} -> {'.'.join(mutant.changed.parts)}")

    def fails(self, item: pytest.Item, following: pytest.Item | None) -> bool:
        self.run += 1
        item._initrequest()  # type: ignore[attr-defined]
        reports = runtestprotocol(item, nextitem=following, log=False)
        return any(report.failed for report in reports)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--mutants", type=int, default=4, help="of each test")
    parser.addoption("--mutants-seed", type=int, default=0, help="chooses them")
    parser.addoption("--mutants-tests", type=int, default=None, help="tests to choose; all without it")


def pytest_configure(config: pytest.Config) -> None:
    rng = random.Random(config.getoption("--mutants-seed"))
    mutation = Mutation(rng, config.getoption("--mutants"))
    config.stash[KEY] = mutation
    execution.MAX_RUNS = MAX_RUNS
    original, number = kernel.parse, device.Device.get_current_device
    kernel.parse = lambda ptx, name=None: mutation.parse(original, ptx, name)
    device.Device.get_current_device = lambda self: number(self) + 1000 * mutation.run


KEY = pytest.StashKey[Mutation]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    count = config.getoption("--mutants-tests")
    if count is not None and count < len(items):
        items[:] = config.stash[KEY].rng.sample(items, count)


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    item.config.stash[KEY].repeat(item, nextitem)
    return True


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    mutation = config.stash[KEY]
    for line in [*mutation.missed, *summary(mutation.figures)]:
        terminalreporter.write_line(line)


def summary(figures: Counter[tuple[str, bool]]) -> Iterator[str]:
    for name in sorted({name for name, _ in figures}):
        found = figures[name, True]
        yield f"{name}: {found} of {found + figures[name, False]} mutants found"
    yield f"all: {sum(n for (_, found), n in figures.items() if found)} of {sum(figures.values())} mutants found"

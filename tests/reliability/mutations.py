"""python tests/reliability/mutations.py FILE... : which small changes of these files does no test notice?

    FILE    of kvpage/*.py or csrc/*.cpp, from the root
    mutations_explained.json    those that need not be noticed, each with the reason

Ends in a table and one line of JSON; with 1 if one that nobody has explained survives.
"""

import argparse
import importlib
import json
import os
import random
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(HERE.parent), str(ROOT)]  # the package of these sources, whichever is installed

import pytest  # noqa: E402
import tiers  # noqa: E402
from mutation.explained import Explained  # noqa: E402
from mutation.mutant import Mutant  # noqa: E402
from mutation.mutation_run import Mutants, MutationRun  # noqa: E402
from mutation.native_mutants import NO_SUCH, NativeMutants, Program  # noqa: E402
from mutation.python_mutants import PythonMutants  # noqa: E402
from mutation.results import Results  # noqa: E402
from mutation.suites import SUITES  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn, track  # noqa: E402
from rich.table import Table  # noqa: E402

console = Console(stderr=True, width=240)
Result = tuple[list[Mutant], dict[int, str | None]]
SEEDS = list(range(1, 12))  # one for each kind of tree that the lives have
OPTIONS = ["-o", "addopts=", "--import-mode=importlib", "-s", "-p", "no:terminal"]
OPTIONS += ["-p", "no:cacheprovider"]


def try_all(mutants: Mutants, indices: list[int], options: argparse.Namespace) -> dict[int, str | None]:
    """For each of the mutants the test that notices it; None if none does, "" if none reaches it."""
    arguments = [*OPTIONS, "-m", tiers.DEFAULT if options.default_tier else "", *_tests(options.files)]
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("the tests without mutants", total=len(indices))

        def advance(index: int, killed_by: str | None) -> None:
            progress.update(task, advance=1, description=mutants.mutants[index].path)
            if not killed_by:
                why = "" if killed_by is None else " (reached by no test)"
                console.print(f"{mutants.mutants[index]}{why}", markup=False)

        run = MutationRun(mutants, indices, advance, options.cases, options.seconds)
        code = pytest.main(arguments, plugins=[run])
    if len(run.killed_by) < len(indices):
        raise RuntimeError(f"pytest ended with {code} before all mutants were tried")
    return run.killed_by


def report(mutants: list[Mutant], killed_by: dict[int, str | None], explained: Explained) -> int:
    """Prints the table; returns how many are left."""
    counts: Counter[tuple[str, str]] = Counter()
    left = []
    for index, killer in killed_by.items():
        mutant = mutants[index]
        verdict = "killed" if killer else "explained" if mutant in explained else "left"
        counts[mutant.path, verdict] += 1
        if verdict == "left":
            left.append(str(mutant))
    table = Table("file", "mutants", "killed", "explained", "left")
    rows = []
    for path in dict.fromkeys(path for path, _ in counts):
        figures = {verdict: counts[path, verdict] for verdict in ("killed", "explained", "left")}
        rows.append({"file": path, "mutants": sum(figures.values()), **figures})
        table.add_row(path, *(f"{value:,}" for value in list(rows[-1].values())[1:]))
    for line in left:
        console.print(line, markup=False)
    Console().print(table)
    print(json.dumps({"files": rows}))
    return len(left)


def try_python(options: argparse.Namespace, indices_of: Callable[[list[Mutant]], list[int]]) -> Result:
    mutants = PythonMutants(options.files)
    return mutants.mutants, try_all(mutants, indices_of(mutants.mutants), options)


def try_native(options: argparse.Namespace, indices_of: Callable[[list[Mutant]], list[int]]) -> Result:
    """The programs first, and tests of Python for what they do not notice."""
    mutants = NativeMutants(options.files)
    left = indices_of(mutants.mutants)
    killed_by: dict[int, str | None] = dict.fromkeys(left)
    if options.stage != "python":
        for name, seeds, count in (("core", SEEDS, options.operations), ("memory", SEEDS[:1], options.failures)):
            killed_by |= _tried_by_program(mutants, left, name, seeds, count)
            left = [index for index in left if killed_by[index] is None]
        killed_by = {index: killer for index, killer in killed_by.items() if killer != NO_SUCH}
    if left and options.stage != "program":
        console.print("building the extension")
        sys.path.insert(0, str(mutants.build_extension()))
        mutants.load(Path(importlib.import_module("kvpage._C").__file__ or ""))
        killed_by |= try_all(mutants, left, options)
    return mutants.mutants, killed_by


def _tried_by_program(
    mutants: NativeMutants, indices: list[int], name: str, seeds: list[int], count: int
) -> dict[int, str | None]:
    console.print(f"building the program {name}")
    program = Program(mutants.build_program(name), seeds, count)
    return {index: program.killed_by(index) for index in track(indices, f"the program {name}", console=console)}


def _tests(files: list[str]) -> list[str]:
    return list(dict.fromkeys(test for file in files for test in SUITES[file]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", choices=SUITES, metavar="FILE", help=", ".join(SUITES))
    parser.add_argument("--only", default="", help="mutants whose description contains this")
    parser.add_argument("--sample", type=int, default=sys.maxsize, help="so many mutants, drawn by --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=40, help="of each test with parameters")
    parser.add_argument("--seconds", type=float, default=60.0, help="of the processor, with the tests of a mutant")
    parser.add_argument("--operations", type=int, default=20_000, help="of the native program, with each of its seeds")
    parser.add_argument("--failures", type=int, default=16_000, help="of allocations in the native program")
    parser.add_argument("--stage", choices=["program", "python", "both"], default="both", help="who is asked of C++")
    parser.add_argument("--again", action="store_true", help="only those neither noticed before nor explained")
    parser.add_argument("--default-tier", action="store_true", help="ask the tests of a plain `pytest` alone")
    options = parser.parse_args()
    if options.default_tier:
        options.stage = "python"
    if len({file.endswith(".cpp") for file in options.files}) > 1:
        parser.error("files must be of one language")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.chdir(ROOT)

    results, explained = Results(), Explained.read()

    def drawn(mutants: list[Mutant]) -> list[int]:
        indices = [index for index, mutant in enumerate(mutants) if options.only in str(mutant)]
        return sorted(random.Random(options.seed).sample(indices, min(options.sample, len(indices))))

    def is_known(mutant: Mutant) -> bool:
        return results.has(mutant) or mutant in explained

    def indices_of(mutants: list[Mutant]) -> list[int]:
        return [index for index in drawn(mutants) if not (options.again and is_known(mutants[index]))]

    try_files = try_native if options.files[0].endswith(".cpp") else try_python
    mutants, killed_by = try_files(options, indices_of)
    results.add([mutants[index] for index, killer in killed_by.items() if killer])
    if options.again:
        before = "noticed before"
        known = [index for index in drawn(mutants) if index not in killed_by and is_known(mutants[index])]
        killed_by |= {index: before if results.has(mutants[index]) else None for index in known}
    return 1 if report(mutants, killed_by, explained) else 0


if __name__ == "__main__":
    sys.exit(main())

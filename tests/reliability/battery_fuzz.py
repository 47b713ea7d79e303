"""Every public entry point, called with what it does not expect: typed errors only, and nothing changed by them.

The calls are made in a process of their own, so that one which crashes it, or never ends, is named all the same.
"""

import json
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from battery import Advance, Battery, Figures
from fuzz_child import JOURNAL_BYTES

SILENCE = 900.0  # seconds without a finished episode that mean that a call does not end; a busy machine imports for two


def fuzz(seed: int, count: int, advance: Advance) -> Figures:
    with tempfile.NamedTemporaryFile() as journal, tempfile.TemporaryFile("w+") as errors:
        journal.truncate(JOURNAL_BYTES)
        command = [sys.executable, "-X", "faulthandler", str(Path(__file__).with_name("fuzz_child.py"))]
        command += [str(seed), str(count), journal.name]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as child:
            lines = _read(child, advance)
        call = Path(journal.name).read_bytes().split(b"\0")[0].decode()
        errors.seek(0)
        if child.returncode:
            raise AssertionError(f"at {call}:\nexit status {child.returncode}\n{errors.read()[-8000:]}")
    return _total(json.loads(lines))


def _read(child: "subprocess.Popen[str]", advance: Advance) -> str:
    """The last line. Kills the child when it is silent for too long."""
    last = ""
    assert child.stdout is not None
    while True:
        timer = threading.Timer(SILENCE, child.kill)
        timer.start()
        line = child.stdout.readline()
        timer.cancel()
        if not line:
            return last
        last = line
        if line.strip().isdigit():
            advance(int(line))


def _total(figures: dict[str, int]) -> Figures:
    total: Figures = {"valid": 0, "refused": 0, "taken": 0}
    for name, value in figures.items():
        total[name.split("_")[0]] += value
    return total


BATTERIES = [Battery("fuzzing of entry points", "calls", 50_000, 10_000_000, fuzz)]

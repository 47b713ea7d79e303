"""Each battery in its short form."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from batteries import all_batteries
from support import pwritev_hook


@pytest.mark.parametrize("battery", all_batteries(), ids=lambda battery: battery.name.replace(" ", "-"))
def test_battery(battery):
    if battery.needs:
        pytest.skip(battery.needs)
    done = []
    figures = battery.run(0, battery.short, done.append)
    assert sum(done) >= battery.short, figures


@pytest.mark.parametrize("name", ["a disk that fails", "power lost amid disk writes"])
def test_the_native_writer_meets_it_too(name):
    """In processes that begin with tests/support/pwritev_hook.py, as the long form does."""
    if pwritev_hook.missing():
        pytest.skip(pwritev_hook.missing())
    command = [sys.executable, str(Path(__file__).parent), "--only", name, "--scale", "0.005"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (battery,) = json.loads(done.stdout.splitlines()[-1])["batteries"]
    assert battery["verdict"] == "passed" and battery["figures"]["native_writes"] > 50

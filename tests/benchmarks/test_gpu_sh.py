"""benchmarks/gpu.sh with commands that only pretend: its order, its limits, and what is left of a part that hangs."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.sh"
TEXT = SCRIPT.read_text().replace("\\\n", " ")
PARTS = {name: (int(limit), command) for name, limit, command in re.findall(r"^part (\w+) (\d+) (.*)$", TEXT, re.M)}
FAKE = '#!/bin/sh\necho "$(basename "$0") $*" >> "$CALLS"\necho "output of $*"\n'
INTERRUPTED_ONCE = """#!{python}
# `timeout -s INT -k SECONDS LIMIT COMMAND...` whose limit is over after the first failure is printed, on any machine.
import os, pathlib, re, signal, subprocess, sys, time
printed = pathlib.Path({printed!r})
heed = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # what a shell starts in the background ignores it
command = subprocess.Popen(sys.argv[6:], start_new_session=True, preexec_fn=heed)
while command.poll() is None and not re.search("^[.]*F", printed.exists() and printed.read_text() or "", re.M):
    time.sleep(0.05)
late = command.poll() is None and sys.argv[1:3] == ["-s", "INT"]
if late:
    os.killpg(command.pid, signal.SIGINT)
code = command.wait()
sys.exit(124 if late else code)
"""

pytestmark = pytest.mark.skipif(not shutil.which("timeout"), reason="needs GNU timeout")


class Machine:
    """A copy of the script where its commands are fakes, each with a body of shell."""

    def __init__(self, root):
        self.root, self.bin, self.calls = root, root / "bin", root / "calls"
        self.bin.mkdir()
        (root / "benchmarks").mkdir()
        shutil.copy(SCRIPT, root / "benchmarks")
        for name in ("python3", "pytest", "kvpage", "nvidia-smi"):
            self.fake(name)

    def fake(self, name, body=""):
        path = self.bin / name
        path.write_text(FAKE + body)
        path.chmod(0o755)

    def run(self, seconds=60):
        environment = {"PATH": f"{self.bin}:{os.environ['PATH']}", "CALLS": str(self.calls), "HOME": str(self.root)}
        done = subprocess.run(
            ["bash", self.root / "benchmarks/gpu.sh", "results"],
            env={**environment, "GPU_SECONDS": str(seconds)},
            capture_output=True,
            text=True,
            timeout=600,  # for a busy machine
        )
        with tarfile.open(self.root / "results/results.tar.gz") as archive:
            kept = {name: archive.extractfile(name).read().decode() for name in archive.getnames()}
        return done, kept


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_limits_leave_room_in_ten_minutes():
    assert sum(limit for limit, _ in PARTS.values()) <= 540
    assert "seconds=${GPU_SECONDS:-540}" in TEXT
    assert PARTS["smoke"][0] <= 30


def test_each_benchmark_stops_itself_before_its_limit():
    benchmarks = [part for name, part in PARTS.items() if name.startswith("bench_")]
    assert len(benchmarks) == 5
    for limit, command in benchmarks:
        assert int(re.search(r"--seconds (\d+)", command)[1]) <= limit - 15  # for what begins before, and the plot


def test_parts_in_their_order():
    names = list(PARTS)
    assert names.index("build") < names.index("smoke") < names.index("bench_paged_attention")
    assert names[-2:] == ["tests", "grid"] and names.index("bench_blend_ops") < names.index("tests")
    assert (SCRIPT.parents[1] / "tests/gpu/test_smoke.py").is_file()


def test_wheels_come_after_the_build_and_before_all_that_may_use_them(machine):
    names = list(PARTS)
    assert names[:2] == ["build", "peers"]
    machine.fake("pytest", 'echo "path $PYTHONPATH"\n[ -d "$PYTHONPATH" ] || [ -n "$PYTHONPATH" ]\n')
    done, kept = machine.run()
    assert done.returncode == 0, done.stdout
    calls = machine.calls.read_text()
    (peers,) = re.findall(r"gpu_wheels.py wheels (\S+)", calls)
    assert f"path {peers}\n" in kept["smoke.txt"] and not Path(peers).exists()


def test_all_results_are_in_one_archive(machine):
    done, kept = machine.run()
    assert done.returncode == 0, done.stdout + done.stderr
    assert {name.removesuffix(".txt") for name in kept} == set(PARTS)
    tests = next(line for line in machine.calls.read_text().splitlines() if "collection-errors" in line)
    assert {"-n 12", "--maxfail=10", "--tb=short"} <= set(re.findall(r"-n 12|--\w+=\w+", tests))


def test_what_fails_is_said_and_the_rest_goes_on(machine):
    machine.fake("kvpage", "exit 3\n")
    done, kept = machine.run()
    assert done.returncode == 1 and set(kept) == {f"{name}.txt" for name in PARTS}
    assert "=== demo failed with exit code 3" in kept["demo.txt"] and "failed" not in kept["tests.txt"]


def test_no_workers_are_asked_for_where_there_are_none(machine):
    machine.fake("python3", '[ "$*" = "-P -c import xdist" ] && exit 1\nexit 0\n')
    machine.run()
    assert "-n 12" not in machine.calls.read_text() and "--maxfail=10" in machine.calls.read_text()


def test_after_all_time_is_spent_nothing_begins(machine):
    machine.fake("nvidia-smi", "sleep 20\n")
    done, kept = machine.run(seconds=1)
    assert done.returncode == 1 and "failed with exit code 124" in kept["machine.txt"]
    assert kept["grid.txt"] == "=== grid: no time left\n" and set(kept) == {f"{name}.txt" for name in PARTS}
    assert "test_vllm_grid" not in machine.calls.read_text()


@pytest.mark.parametrize("workers", [[], ["-n", "2"]])
def test_a_failure_before_a_timeout_is_reported(machine, workers):
    """The whole run takes too long; what failed until then is told all the same."""
    if workers:
        pytest.importorskip("xdist")
    tests, printed = machine.root / "test_slow.py", machine.root / "results/smoke.txt"
    tests.write_text(
        "import time\ndef test_wrong():\n    assert 1 == 2\n"
        "def test_right():\n    pass\ndef test_long():\n    time.sleep(600)\n"
    )
    run = f"exec {sys.executable} -m pytest -q -p no:cacheprovider --tb=short {' '.join(workers)} {tests}\n"
    machine.fake("pytest", f'case "$*" in *smoke.py) {run};; esac\n')
    (machine.bin / "timeout").write_text(INTERRUPTED_ONCE.format(python=sys.executable, printed=str(printed)))
    (machine.bin / "timeout").chmod(0o755)
    _, kept = machine.run()
    assert "assert 1 == 2" in kept["smoke.txt"] and "failed" in kept["smoke.txt"], kept["smoke.txt"]
    assert "=== smoke failed with exit code 124" in kept["smoke.txt"]

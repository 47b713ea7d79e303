"""The parts of benchmarks/gpu.sh without a device: benchmarks over one that is a CPU, and the whole script."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

pytest.importorskip("tomllib")
torch = pytest.importorskip("torch")
pytest.importorskip("matplotlib")

from kvpage.benchmarks import fake_cuda  # noqa: E402
from kvpage.benchmarks.gpu.dry_run import FAKE, FAKED, dry  # noqa: E402
from kvpage.benchmarks.gpu.part import last_json  # noqa: E402
from kvpage.benchmarks.gpu.plan import Folders, plan  # noqa: E402

SOURCE = Path(__file__).parents[2]  # gpu.sh runs there

ROWS = {
    "bench_paged_attention": "results",
    "bench_swap": "rows",
    "bench_reshape_gather": "results",
    "bench_blend_ops": "results",
    "bench_shared_prefix": "results",
    "bench_same_bits_gpu": "results",
    "flashinfer": "results",
}


@pytest.mark.parametrize("name", FAKED)
def test_a_benchmark_checks_measures_and_reports(name, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(SOURCE)
    folders = Folders(tmp_path, tmp_path, tmp_path, tmp_path)
    part = dry(next(part for part in plan(folders) if part.name == name))
    script, *arguments = part.command[1 + len(FAKE) :]
    fake_cuda.run(script, arguments)
    result = last_json(capsys.readouterr().out.splitlines())
    assert result is not None and result[ROWS[name]]
    assert name == "flashinfer" or (tmp_path / f"{name}.png").stat().st_size > 0


def test_tensors_of_the_fake_are_in_host_memory():
    with fake_cuda.fake_cuda():
        there = torch.ones(3, device="cuda")
        both = [there.cuda(), there.pin_memory(), there.to("cuda:0"), torch.empty_like(there, device="cuda")]
        with torch.device("cuda"):
            both.append(torch.zeros(2))
        assert torch.cuda.is_available() and torch.device("cuda").type == "cuda"
    assert all(tensor.device.type == "cpu" for tensor in both)
    assert there.tolist() == [1.0] * 3 and torch.cuda.Event is not fake_cuda.FakeEvent


def test_a_fake_event_is_later_than_one_before():
    first, second = (fake_cuda.FakeEvent(enable_timing=True) for _ in range(2))
    for event in (first, second):
        event.record()
    assert first.elapsed_time(second) > 0 and not first.query()


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
def test_each_part_of_the_whole_script_leaves_its_line(tmp_path):
    pytest.importorskip("triton")
    done = subprocess.run(
        ["bash", SOURCE / "benchmarks/gpu.sh", "--dry-run", "--seconds", "3600", tmp_path],
        env={**os.environ, "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=3600,  # for a busy machine
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with tarfile.open(tmp_path / "results.tar.gz") as archive:
        lines = archive.extractfile("results.jsonl").read().decode().splitlines()
        names = archive.getnames()
    parts = [json.loads(line) for line in lines]
    expected = plan(Folders(tmp_path, tmp_path, tmp_path, tmp_path))
    assert [part["part"] for part in parts] == [part.name for part in expected]
    silent = {"build", "smoke", "calibrate", "demo", "tests", "grid"}
    assert {part["part"] for part in parts if part["result"] is None} <= silent
    assert {f"{part['part']}.txt" for part in parts} | {"summary.txt", "bench_swap.png"} <= set(names)
    assert [path.name for path in tmp_path.iterdir()] == ["results.tar.gz"]

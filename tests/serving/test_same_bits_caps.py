"""The same bits where kvpage's kernels, torch's operators and oneDNN are capped to an older class of processors."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.seeds import seed_of

import kvpage._C as _C

ROOT = Path(__file__).parents[2]
SETS = ["base", "avx2", "avx512", "avx512bf16", "amx"]
OF_OTHERS = {"avx512": ("avx512", "AVX512_CORE"), "avx2": ("avx2", "AVX2"), "base": ("default", "SSE41")}
"""The caps of torch's operators, and of oneDNN."""


def run(cap: str, *args: str, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **more, "KVPAGE_MAX_CPU_ISA": cap, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *args], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )


def best_under(cap: str) -> str:
    return next(name for name in _C.linear_kernels() if name in SETS[: SETS.index(cap) + 1])


@pytest.mark.parametrize("cap", [*SETS, ""])
def test_the_core_takes_nothing_better(cap: str) -> None:
    done = run(cap, "-c", "import kvpage._C as _C; print(*_C.linear_kernels())")
    assert done.returncode == 0, done.stderr
    allowed = SETS[: SETS.index(cap) + 1] if cap else SETS
    assert done.stdout.split() == [name for name in _C.linear_kernels() if name in allowed or name not in SETS]


@pytest.mark.parametrize("cap", SETS[:-1])
def test_no_tiles_are_taken_under_a_cap(cap: str) -> None:
    done = run(cap, "-c", "import kvpage._C as _C; print(_C.product_tiles())")
    assert done.stdout.strip() == str(("", f"KVPAGE_MAX_CPU_ISA is {cap}"))


def test_another_name_is_refused() -> None:
    done = run("avx3", "-c", "import kvpage")
    assert done.returncode != 0
    assert "KVPAGE_MAX_CPU_ISA must be base, avx2, avx512, avx512bf16 or amx, got avx3" in done.stderr


@pytest.mark.parametrize("cap", OF_OTHERS)
def test_lives_under_a_cap(tmp_path: Path, cap: str) -> None:
    of_torch, of_onednn = OF_OTHERS[cap]
    caps = {"ATEN_CPU_CAPABILITY": of_torch, "ONEDNN_MAX_CPU_ISA": of_onednn}
    done = run(cap, "tests/support/capped_lives.py", str(seed_of(3)), str(tmp_path), **caps)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f" {best_under(cap)} torch " in done.stdout

"""The parts of the run, the ones that matter most first; dry_run.py has their small counterparts.

The limits until the last benchmark fit into the time of a run. What parts leave of it goes to the tests, to the peers
that come last, and to nobody else.
"""

import importlib.util
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from .part import Part

ROOT = Path(__file__).parents[2]
SECONDS = 540.0
PROCESSES = 12
GPU_TEST = re.compile(r"mark\.gpu|import .*\b(CUDA|ON_ALL|ON_KERNELS|DEVICES)\b")
"""A file with tests that need a device: it marks them, or takes parameters from helpers that do."""
SMOKE, GRID = "tests/gpu/test_smoke.py", "tests/integrations/test_vllm_grid.py"
LEFT_OUT = ("tests/reliability/", "tests/support/", SMOKE, GRID)
FLASHINFER = ("flashinfer*", "apache_tvm_ffi*")
INFO = "import json, kvpage; print(json.dumps(dict(kvpage.build_info()), default=str))"
OTHER_PEERS = ("flash_attn", "flash_attn_3", "flash_mla", "vllm", "cudnn")


@dataclass(frozen=True, slots=True)
class Folders:
    """Where a run finds and leaves things. work: takes logs and plots. wheels: of peers; it need not be there. peers:
    takes what is in the wheels. flashinfer: likewise, of FlashInfer alone."""

    work: Path
    wheels: Path
    peers: Path
    flashinfer: Path


def python(*arguments: str) -> tuple[str, ...]:
    """Return the command of a module or script in this run's own Python."""
    return sys.executable, *arguments


def plan(folders: Folders) -> list[Part]:
    """Return the parts in their order."""
    return [*_preparation(folders), *_benchmarks(folders), *_tests(folders), *_flashinfer(folders)]


def _preparation(folders: Folders) -> list[Part]:
    fill = python("-m", "kvpage.benchmarks.fill_triton_cache", "--processes", str(PROCESSES))
    install = python("-m", "pip", "install", "--no-build-isolation", "--no-deps", ".")
    return [
        Part("versions", 30, python("benchmarks/gpu_versions.py"), must_pass=True),
        Part("build", 105, install, must_pass=True),
        Part("smoke", 60, pytest("-m", "gpu", SMOKE), must_pass=True),
        Part("peers", 15, _wheels(folders, folders.peers, "--without", *FLASHINFER)),
        Part("info", 10, python("-c", INFO)),
        Part("calibrate", 10, python("-m", "kvpage", "info", "--calibrate")),
        Part("compile", 45, fill),
    ]


def _wheels(folders: Folders, target: Path, *choice: str) -> tuple[str, ...]:
    return python("benchmarks/gpu_wheels.py", str(folders.wheels), str(target), *choice)


def _benchmarks(folders: Folders) -> list[Part]:
    """kvpage's own kernels, and peers that need no compiler. Each benchmark ends by itself before its limit."""

    def bench(name: str, seconds: int, *arguments: str) -> Part:
        plot, own = str(folders.work / f"{name}.png"), str(seconds - 20)
        return Part(name, seconds, python(f"benchmarks/{name}.py", *arguments, "--plot", plot, "--seconds", own))

    return [
        bench("bench_paged_attention", 60, "--without", "flashinfer"),
        bench("bench_serving_gpu", 50, "--attention", "kvpage"),
        bench("bench_swap", 35),
        bench("bench_reshape_gather", 30, "--device", "cuda", "--tokens", "64", "4096", "65536"),
        bench("bench_blend_ops", 30, "--device", "cuda"),
        bench("bench_shared_prefix", 30, "--device", "cuda", "--dtypes", "bf16"),
        bench("bench_same_bits_gpu", 30, "--device", "cuda"),
    ]


def _tests(folders: Folders) -> list[Part]:
    workers = ["-n", str(PROCESSES)] if importlib.util.find_spec("xdist") else []
    marked = ("-m", "gpu", *workers, "--maxfail=10", "--continue-on-collection-errors")
    return [
        Part("demo", 15, python("-m", "kvpage", "demo", "--device", "cuda", "--plot", str(folders.work / "demo.png"))),
        Part("tests", 75, pytest(*marked, *gpu_test_files())),
        Part("grid", 30, pytest(*marked, GRID)),
    ]


def _flashinfer(folders: Folders) -> list[Part]:
    """FlashInfer compiles its kernels where it has none: the last part, which takes nothing from the others."""
    script = ("benchmarks/bench_paged_attention.py", "--cases", "peers", "--without", *OTHER_PEERS)
    return [
        Part("flashinfer_wheels", 15, _wheels(folders, folders.flashinfer, "--only", *FLASHINFER)),
        Part("flashinfer", 120, python(*script, "--seconds", "100")),
    ]


def pytest(*arguments: str) -> tuple[str, ...]:
    """Return the command of a test run."""
    return python("-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", *arguments)


def gpu_test_files() -> list[str]:
    """Return the files with tests that need a device, those of whole engines first: naming them spares a collection."""
    names = [path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")]
    found = [name for name in names if not name.startswith(LEFT_OUT) and GPU_TEST.search((ROOT / name).read_text())]
    return sorted(found, key=lambda name: (not name.startswith("tests/gpu/"), name))

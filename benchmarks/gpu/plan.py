"""The parts of the run, the ones that matter most first, and their small counterparts of a dry run.

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
LEFT_OUT = ("tests/reliability/", "tests/support/", "tests/gpu/test_smoke.py", "tests/integrations/test_vllm_grid.py")
FLASHINFER = ("flashinfer*", "apache_tvm_ffi*")
INFO = "import json, kvpage; print(json.dumps(dict(kvpage.build_info()), default=str))"
FAKE = ("-m", "kvpage.benchmarks.fake_cuda")
OTHER_PEERS = ("flash_attn", "flash_attn_3", "flash_mla", "vllm", "cudnn")


@dataclass(frozen=True, slots=True)
class Folders:
    """Where a run finds and leaves things.

    Args:
        work: Takes logs and plots.
        wheels: Wheels of peers; it need not be there.
        peers: Takes what is in the wheels.
        flashinfer: Likewise, of FlashInfer alone.
    """

    work: Path
    wheels: Path
    peers: Path
    flashinfer: Path


def python(*arguments: str) -> tuple[str, ...]:
    """Return the command of a module or script in this run's own Python.

    Args:
        *arguments: Of the interpreter.
    """
    return sys.executable, *arguments


def plan(folders: Folders, is_dry: bool = False) -> list[Part]:
    """Return the parts in their order.

    Args:
        folders: Of the run.
        is_dry: Whether each part is to be tried by something small on a machine without a device.
    """
    begin, measured, end = _preparation(folders, is_dry), _benchmarks(folders, is_dry), _tests(folders, is_dry)
    return [*begin, *measured, *end, *_flashinfer(folders, is_dry)]


def _preparation(folders: Folders, is_dry: bool) -> list[Part]:
    install = python(
        "-m", "pip", "install", "--no-build-isolation", "--no-deps", *(["--dry-run"] if is_dry else []), "."
    )
    fill = python("-m", "kvpage.benchmarks.fill_triton_cache", "--processes", f"{1 if is_dry else PROCESSES}")
    return [
        Part(
            "versions", 30, python("benchmarks/gpu_versions.py", *(["--without-device"] if is_dry else [])), must_pass=True
        ),
        Part("build", 105, install, must_pass=True),
        Part("smoke", 60, _pytest("tests/gpu/test_smoke.py", *(["-k", "cpu"] if is_dry else ["-m", "gpu"])), must_pass=True),
        Part("peers", 15, _wheels(folders, folders.peers, "--without", *FLASHINFER)),
        Part("info", 10, python("-c", INFO)),
        Part("calibrate", 15, python("-m", "kvpage", "info", *([] if is_dry else ["--calibrate"]))),
        Part("compile", 50, (*fill, *(["--only", "write rows"] if is_dry else []))),
    ]  # fmt: skip


def _wheels(folders: Folders, target: Path, *choice: str) -> tuple[str, ...]:
    return python("benchmarks/gpu_wheels.py", str(folders.wheels), str(target), *choice)


def _benchmarks(folders: Folders, is_dry: bool) -> list[Part]:
    """kvpage's own kernels, and peers that need no compiler. Each benchmark ends by itself before its limit."""

    def bench(name: str, seconds: int, *arguments: str, tiny: tuple[str, ...]) -> Part:
        plot, end = ("--plot", str(folders.work / f"{name}.png")), "1" if is_dry else f"{seconds - 20}"
        command = (f"benchmarks/{name}.py", *arguments, *plot, "--seconds", end)
        if is_dry:
            runs_on_cpu = "cpu" in tiny
            command = (*(() if runs_on_cpu else FAKE), *command, *tiny)
        return Part(name, seconds, python(*command))

    return [
        bench("bench_paged_attention", 75, "--without", "flashinfer", tiny=("--sizes", "tiny", "--rounds", "1")),
        bench(
            "bench_serving_gpu", 65, "--attention", "kvpage",
            tiny=("--device", "cpu", "--shape", "tiny", "--batches", "2", "--context", "8", "--requests", "2",
                  "--prompt-tokens", "8", "--tokens", "2", "--rounds", "1", "--without", "generate_batch"),
        ),
        bench("bench_swap", 45, tiny=("--sizes", "tiny", "--rounds", "1")),
        bench(
            "bench_reshape_gather", 40, "--device", "cuda", "--tokens", "64", "4096", "65536",
            tiny=("--tokens", "16", "--chunk-tokens", "16", "--rounds", "1"),
        ),
        bench(
            "bench_blend_ops", 30, "--device", "cuda", tiny=("--layers", "3", "--tokens", "64", "--rounds", "1"),
        ),
    ]  # fmt: skip


def _tests(folders: Folders, is_dry: bool) -> list[Part]:
    small = ("--requests", "4", "--turns", "1", "--max-tokens", "4", "--sample", "1") if is_dry else ()
    demo = ("demo", "--device", "cpu" if is_dry else "cuda", "--plot", str(folders.work / "demo.png"), *small)
    workers = ["-n", str(PROCESSES)] if importlib.util.find_spec("xdist") and not is_dry else []
    marked = (
        ["--collect-only"] if is_dry else ["-m", "gpu", *workers, "--maxfail=10", "--continue-on-collection-errors"]
    )
    files = ["tests/gpu/test_on_gpu.py"] if is_dry else gpu_test_files()
    return [
        Part("demo", 15, python("-m", "kvpage", *demo)),
        Part("tests", 75, _pytest(*marked, *files)),
        Part("grid", 30, _pytest(*marked, "tests/gpu/test_smoke.py" if is_dry else "tests/integrations/test_vllm_grid.py")),
    ]  # fmt: skip


def _flashinfer(folders: Folders, is_dry: bool) -> list[Part]:
    """FlashInfer compiles its kernels where it has none: the last part, which takes nothing from the others."""
    script = ("benchmarks/bench_paged_attention.py", "--cases", "peers", "--without", *OTHER_PEERS)
    if is_dry:
        script = (*FAKE, *script, "--sizes", "tiny", "--rounds", "1")
    return [
        Part("flashinfer_wheels", 15, _wheels(folders, folders.flashinfer, "--only", *FLASHINFER)),
        Part("flashinfer", 120, python(*script, "--seconds", "1" if is_dry else "100")),
    ]


def _pytest(*arguments: str) -> tuple[str, ...]:
    return python("-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", *arguments)


def gpu_test_files() -> list[str]:
    """Return the files with tests that need a device, those of whole engines first: naming them spares a collection."""
    names = [path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")]
    found = [name for name in names if not name.startswith(LEFT_OUT) and GPU_TEST.search((ROOT / name).read_text())]
    return sorted(found, key=lambda name: (not name.startswith("tests/gpu/"), name))

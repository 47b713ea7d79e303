"""Fills Triton's cache with the kernels that the GPU benchmarks launch, without a GPU, or before them on one.

    python -m kvpage.benchmarks.fill_triton_cache [--capability 80 90] [--processes N] [--library PATH]
        [--only WORD ...]

The kernels go into TRITON_CACHE_DIR, for the capability of the GPU that is there, else for those that are named. A
launch finds them on another machine if its Triton is the same wheel, for the same Python, and kvpage's kernels are the
same text. Triton's key has the bytes of its native library, which differ between Pythons: `--library` names that of
the other wheel, so that one Python fills the cache of another (fill_triton_cache.sh).
"""

import argparse
import builtins
import contextlib
import functools
import importlib
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any
from unittest import mock

import torch
import triton
from triton.errors import TritonError

from kvpage.benchmarks.fake_device import MULTIPROCESSORS, fake_device
from kvpage.benchmarks.gpu_launches import launches
from kvpage.benchmarks.script import positive

KEY_MODULES = "triton.runtime.cache", "triton.compiler.compiler"
"""Where triton_key is, from Triton 3.4 on and before."""
LIBRARY = "libtriton.so"


@contextlib.contextmanager
def keys_of(library: Path | None) -> Iterator[None]:
    """Let Triton make the keys that it would make with another libtriton.so; None is its own."""
    if library is None:
        yield
        return
    module = importlib.import_module(next(name for name in KEY_MODULES if _has_key(name)))

    def opened(path: Any, *args: Any, **kwargs: Any) -> IO[Any]:
        is_library = Path(os.fspath(path)).name == LIBRARY
        return builtins.open(library if is_library else path, *args, **kwargs)

    with mock.patch.object(module, "open", opened, create=True):
        key = module.triton_key.__wrapped__()  # the other one is remembered
    with mock.patch.object(module, "triton_key", lambda: key):
        yield


def _has_key(name: str) -> bool:
    return hasattr(importlib.import_module(name), "triton_key")


def names_of(capability: int, only: list[str]) -> list[str]:
    """Return the names of all launches, or of those with one of the words."""
    with fake_device(capability) as device:
        names = [name for name, _ in launches(device)]
    return [name for name in names if not only or any(word in name for word in only)]


def compile_share(job: tuple[int, list[str]], library: Path | None) -> dict[str, str]:
    """Compile what launches need; return, in a line, the error of each that cannot be compiled.

    job: the capability, and the names of the launches.
    """
    capability, names = job
    failed = {}
    with keys_of(library), fake_device(capability) as device:
        device.keeps = False
        for name, call in launches(device):
            if name in names:
                try:
                    call()
                except (TritonError, RuntimeError) as error:  # the other kernels are compiled all the same
                    failed[name] = _first_cause(error)
    return failed


def _first_cause(error: BaseException) -> str:
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__  # type: ignore[assignment]  # one of them is there
    return f"{type(error).__name__}: {error}".splitlines()[0]


def num_kernels(folder: Path) -> int:
    """Return the compiled kernels in a cache. folder: of the cache; it need not be there."""
    return sum(1 for _ in folder.glob("*/*.cubin"))


def fill(capabilities: list[int], processes: int, library: Path | None, only: list[str]) -> dict[str, Any]:
    """Compile in several processes, each of which takes every n-th launch; return what to say in a line of JSON."""
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    before, begin = num_kernels(folder), time.monotonic()
    names = names_of(capabilities[0], only)
    jobs = [(capability, names[first::processes]) for capability in capabilities for first in range(processes)]
    compiler = functools.partial(compile_share, library=library)
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        failed = {name: error for part in pool.imap_unordered(compiler, jobs, 1) for name, error in part.items()}
    return {
        "benchmark": "fill_triton_cache", "triton": triton.__version__, "capabilities": capabilities,
        "launches": len(names), "cached_before": before, "compiled": num_kernels(folder) - before,
        "failed": failed, "seconds": time.monotonic() - begin,
    }  # fmt: skip


def capabilities_here() -> list[int]:
    """Return that of the GPU that is here, or all that are known."""
    if not torch.cuda.is_available():
        return list(MULTIPROCESSORS)
    major, minor = torch.cuda.get_device_capability()
    return [10 * major + minor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=int, nargs="+", choices=MULTIPROCESSORS, help="by default the GPU's")
    parser.add_argument("--processes", type=positive, default=os.cpu_count() or 1)
    parser.add_argument("--library", type=Path, help="libtriton.so of the Triton that the cache is for")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="only launches with such a word")
    options = parser.parse_args()
    report = fill(options.capability or capabilities_here(), options.processes, options.library, options.only)
    print(json.dumps(report))
    for name, error in report["failed"].items():
        print(f"{name}: {error}")
    sys.exit(1 if report["failed"] else 0)


if __name__ == "__main__":
    main()

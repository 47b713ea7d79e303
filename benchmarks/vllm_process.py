"""The libraries that a process with vLLM's CPU build preloads."""

from pathlib import Path

PRELOADED = ("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4",)
"""Paths that vLLM's guide for CPUs names."""


def recommended(python: Path) -> list[Path]:
    """Return the libraries that vLLM's guide for CPUs has its users preload, as far as they are there.

    python: an interpreter, whose environment may have the OpenMP of Intel's compiler.
    """
    wanted = [*map(Path, PRELOADED), python.parent.parent / "lib" / "libiomp5.so"]
    return [path for path in wanted if path.exists()]

"""Says what a machine has, whether kvpage can be built and measured there, and how fast its memory and products are.

    python benchmarks/gpu_versions.py [--without-device]

It needs torch alone, so it comes before the build. Each fault is a line, and the exit code is 1 then.
"""

import argparse
import contextlib
import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tomllib
import torch

PROJECT = Path(__file__).parents[1]
SHOWN = (
    *("torch", "triton", "transformers", "numpy", "pytest", "pytest-xdist", "setuptools", "pybind11", "cmake", "ninja"),
    *("flashinfer-python", "flash-attn", "vllm"),
)
COPY_BYTES, PRODUCT_SIZE = 1 << 30, 8192


def version_of(package: str) -> str | None:
    """Return the version of a package, or None where it is not installed. package: its name."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def build_faults(requirements: list[str]) -> list[str]:
    """Return a line for each requirement of the build that the environment does not meet.

    A requirement is as in pyproject.toml: a name, and at most one ">=". A program of the name does for a package.
    """
    faults = []
    for requirement in requirements:
        name, _, least = requirement.partition(">=")
        version = version_of(name)
        if version is None:
            if shutil.which(name) is None:
                faults.append(f"{name} must be installed for the build, it is not")
        elif least and numbers_of(version) < numbers_of(least):
            faults.append(f"{name} must be {least} or later for the build, got {version}")
    return faults


def numbers_of(version: str) -> tuple[int, ...]:
    """Return the numbers that a version begins with. version: such as 77.0.3, or 2.11.0+cu130."""
    beginning = re.match(r"\d+(\.\d+)*", version)
    return () if beginning is None else tuple(map(int, beginning[0].split(".")))


def device_faults() -> list[str]:
    """Return a line for each thing that is missing to compile for a device and to use it."""
    faults = [] if shutil.which("nvcc") else ["nvcc must be on the PATH, it is not"]
    if not torch.cuda.is_available():
        faults.append(f"torch must find a CUDA device, torch {torch.__version__} finds none")
    return faults


def bounds() -> dict[str, Any]:
    """Return the device's name, and its rates: bytes a second of a copy, both ways counted, and bf16 operations."""
    source, target = (torch.ones(COPY_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
    left, right = (torch.randn(PRODUCT_SIZE, PRODUCT_SIZE, device="cuda").bfloat16() for _ in range(2))
    copy, product = seconds(lambda: target.copy_(source)), seconds(lambda: left @ right)
    return {
        "device": torch.cuda.get_device_name(),
        "copy GB/s": 2e-9 * COPY_BYTES / copy,
        "product TFLOP/s": 2e-12 * PRODUCT_SIZE**3 / product,
    }


def seconds(call: Callable[[], object], number: int = 10) -> float:
    """Return the mean time of a call, by the device's clock."""
    call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(number):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--without-device", action="store_true", help="for a dry run: only what the build needs")
    options = parser.parse_args()
    versions = {"python": sys.version.split()[0], "cuda": torch.version.cuda}
    versions |= {package: version_of(package) for package in SHOWN}
    for name, version in versions.items():
        print(f"{name:20} {version or '-'}")
    requirements = tomllib.loads((PROJECT / "pyproject.toml").read_text())["build-system"]["requires"]
    faults = build_faults(requirements) + ([] if options.without_device else device_faults())
    if not options.without_device and shutil.which("nvidia-smi"):
        subprocess.run(["nvidia-smi"])
    print(
        json.dumps({"versions": versions, "faults": faults, **({} if faults or options.without_device else bounds())})
    )
    if faults:
        sys.exit("; ".join(faults))


if __name__ == "__main__":
    main()

"""Install the peers of the GPU benchmarks from a folder of wheels, without a network and without their dependencies.

    python benchmarks/gpu_wheels.py WHEELS TARGET [--only|--without PATTERN ...]

All of WHEELS/*.whl whose names fit go into TARGET, for PYTHONPATH.

The environment stays as it is. Wheels are carried with all that they need and the machine lacks: FlashInfer (with
apache-tvm-ffi and, where there is no nvcc, its compiled kernels), flash-attn, flash_attn_3, FlashMLA, vLLM.
"""

import argparse
import fnmatch
import json
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path


def install(wheels: Path, target: Path, only: Sequence[str] = ("*",), without: Sequence[str] = ()) -> list[str]:
    """Install wheels at once, as pip leaves out folders that an earlier call has made; return the names of those that
    were installed. Broken ones are said.

    wheels: a folder, which need not be there. target: a folder that is made. only, without: patterns of file names.
    """
    found = [wheel for wheel in sorted(wheels.glob("*.whl")) if _fits(wheel, only) and not _fits(wheel, without)]
    sound = [wheel for wheel in found if zipfile.is_zipfile(wheel)]
    for wheel in found:
        if wheel not in sound:
            print(f"{wheel.name} is left out: it is no archive")
    if not sound:
        return []
    options = ["-q", "--no-index", "--no-deps", "--no-compile", "--target", str(target)]
    done = subprocess.run([sys.executable, "-m", "pip", "install", *options, *map(str, sound)])
    if done.returncode != 0:
        print("the wheels are left out: pip could not install them together")
        return []
    return [wheel.name for wheel in sound]


def _fits(wheel: Path, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatch(wheel.name, pattern) for pattern in patterns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN")
    parser.add_argument("--without", nargs="+", default=[], metavar="PATTERN")
    options = parser.parse_args()
    installed = install(options.wheels, options.target, options.only, options.without)
    if not installed:
        print(f"no wheels in {options.wheels}: the peers are those of the environment")
    print(json.dumps({"wheels": installed}))


if __name__ == "__main__":
    main()

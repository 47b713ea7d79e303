"""Install the peers of the GPU benchmarks from a folder of wheels, without a network and without their dependencies.

    python benchmarks/gpu_wheels.py WHEELS TARGET        all of WHEELS/*.whl, into TARGET, for PYTHONPATH

The environment stays as it is. Wheels are carried with all that they need and the machine lacks: FlashInfer (with
apache-tvm-ffi and, where there is no nvcc, its compiled kernels), flash-attn, flash_attn_3, FlashMLA, vLLM.
"""

import argparse
import subprocess
import sys
import zipfile
from pathlib import Path


def install(wheels: Path, target: Path) -> list[str]:
    """Install all wheels at once: pip leaves out folders that an earlier call has made. Broken ones are said.

    Args:
        wheels: A folder, which need not be there.
        target: A folder that is made.

    Returns:
        The names of those that were installed.
    """
    found = sorted(wheels.glob("*.whl"))
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", type=Path)
    parser.add_argument("target", type=Path)
    options = parser.parse_args()
    installed = install(options.wheels, options.target)
    print(
        "\n".join(installed) if installed else f"no wheels in {options.wheels}: the peers are those of the environment"
    )


if __name__ == "__main__":
    main()

"""Install the peers of the GPU benchmarks from a folder of wheels, without a network and without their dependencies.

    python benchmarks/gpu_wheels.py WHEELS TARGET        all of WHEELS/*.whl, into TARGET, for PYTHONPATH

The environment stays as it is. Wheels are carried with all that they need and the machine lacks: FlashInfer (with
apache-tvm-ffi and, where there is no nvcc, its compiled kernels), flash-attn, flash_attn_3, FlashMLA, vLLM.
"""

import argparse
import subprocess
import sys
from pathlib import Path


def install(wheels: Path, target: Path) -> list[str]:
    """Install each wheel; one that fails is said, and left out.

    Args:
        wheels: A folder, which need not be there.
        target: A folder that is made.

    Returns:
        The names of those that were installed.
    """
    installed = []
    for wheel in sorted(wheels.glob("*.whl")):
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", str(target)]
        if subprocess.run([*command, str(wheel)]).returncode == 0:
            installed.append(wheel.name)
        else:
            print(f"{wheel.name} is left out: pip could not install it")
    return installed


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

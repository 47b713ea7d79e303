"""What a swap between host and device asks of CUDA, without a device: a runtime that accepts all and counts it.

The program is the library's own code with that runtime in place of NVIDIA's; see tests/support/cuda.
"""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FAKE, CSRC = ROOT / "tests" / "support" / "cuda", ROOT / "csrc"
SOURCES = [
    *(f"base/{name}.cpp" for name in ("copy_bytes", "workers")),
    *(f"copy/plan/{name}.cpp" for name in ("copy_geometry", "copy_plan", "overlap")),
    *("copy/copier/block_copier.cpp", "copy/host/host_copy.cpp", "copy/sm_kernel/launch_plan.cpp"),
    "copy/copy_engine/copy_engine.cu",
]
KERNEL = "copy/sm_kernel/sm_kernel.cu"


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    if shutil.which("nvcc") is None:
        pytest.skip("the program needs nvcc")
    folder = tmp_path_factory.mktemp("swap_calls")
    one, kernel, out = folder / "one.cpp", folder / "sm_kernel.o", folder / "swap_calls"
    sources = [*(CSRC / name for name in SOURCES), *(CSRC / "cuda").glob("*.cu"), *FAKE.glob("*.cpp")]
    one.write_text("".join(f'#include "{source}"\n' for source in sources))  # one file compiles four times as fast
    nvcc = ["nvcc", "-std=c++20", "-arch=sm_80", "-cudart=none", "-DKVPAGE_HAS_CUDA=1", f"-I{CSRC}", f"-I{FAKE}"]
    subprocess.run([*nvcc, "-c", CSRC / KERNEL, "-o", kernel], check=True)
    subprocess.run([*nvcc, one, kernel, "-o", out], check=True)
    return out


def calls(program, executor, steps, num_blocks, num_layers):
    command = [program, executor, steps, str(num_blocks), str(num_layers)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.parametrize("steps", ["even", "uneven"])
@pytest.mark.parametrize("num_blocks, num_layers", [(1, 1), (2, 3), (256, 32)])
def test_a_swap_by_the_copy_engines_is_one_call(program, steps, num_blocks, num_layers):
    """It asks for room for computation, and once its arrays have grown, allocates for the plan alone."""
    found = calls(program, "engine", steps, num_blocks, num_layers)
    assert found["batches"] == 1 and found["launches"] == found["copies"] == 0
    assert found["extents"] == 2 * num_blocks * num_layers and found["as_planned"]
    assert found["flags"] == 1 and found["allocations"] <= 4


def test_more_extents_than_a_batch_holds_are_several(program):
    found = calls(program, "engine", "uneven", 1025, 33)
    assert found["batches"] == 2 and found["extents"] == 2 * 1025 * 33 > 2**16 and found["as_planned"]


def test_a_driver_without_batches_copies_each_extent(program):
    found = calls(program, "each", "even", 5, 3)
    assert found["batches"] == 0 and found["copies"] == found["extents"] == 30 and found["as_planned"]


def test_nothing_to_swap_asks_for_nothing(program):
    for executor in ("engine", "kernel"):
        found = calls(program, executor, "even", 0, 32)
        assert found["batches"] == found["launches"] == found["copies"] == 0


def test_a_swap_by_the_kernel_is_one_launch_on_few_groups(program):
    found = calls(program, "kernel", "even", 256, 32)
    assert found["launches"] == 1 and found["threads"] == 16 * 256
    assert found["batches"] == found["copies"] == 0 and found["allocations"] <= 5

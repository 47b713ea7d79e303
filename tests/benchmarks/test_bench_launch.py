"""What a launch costs the host, counted and not timed: launches, and Python calls of kvpage's own."""

import os

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter replaces the compiler", allow_module_level=True)

from kvpage.benchmarks import bench_launch  # noqa: E402
from kvpage.benchmarks.fake_device import fake_device  # noqa: E402
from kvpage.benchmarks.python_calls import num_calls  # noqa: E402

MOST_CALLS = {
    "write rows": 20,
    "attend": 60,
    "gather": 30,
    "gather others": 35,
    "store chunk": 60,
    "load chunk": 60,
    "blend rows": 30,
}


@pytest.fixture(scope="module")
def counts():
    """Launches and Python calls of each operation, repeated."""
    with fake_device() as device:
        found = {}
        for name, call in bench_launch.make_calls(device).items():
            found[name] = bench_launch.check(device, call), num_calls(call)
        return found


@pytest.mark.parametrize("name", MOST_CALLS)
def test_a_repeated_call_is_few_launches_and_few_python_calls(counts, name):
    num_launches, num_calls = counts[name]
    assert num_launches == (2 if name == "attend" else 1)
    assert num_calls <= MOST_CALLS[name]


def test_what_the_fake_replaces_is_put_back():
    import torch

    from kvpage.kernels import gather
    from kvpage.ops.cuda import rows

    before = gather._kinds, rows._launches, torch.cuda.current_device
    with fake_device() as device:
        device.forget()
    assert (gather._kinds, rows._launches, torch.cuda.current_device) == before


def test_a_second_fake_is_told_of_its_own_launches():
    for _ in range(2):
        with fake_device() as device:
            call = bench_launch.make_calls(device)["blend rows"]
            call()
            assert len(device.launches) == 1

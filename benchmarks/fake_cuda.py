"""A CUDA device that is this machine's CPU: scripts for a GPU run to their end without one, and compute what is right.

    python -m kvpage.benchmarks.fake_cuda benchmarks/bench_swap.py --sizes tiny

Tensors for the device lie in host memory, so kvpage's operations take their ways of a CPU. Its clock is the host's.
What kernels launch is for fake_device.py; here a script shows that it finds, checks, measures and reports.
"""

import contextlib
import runpy
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

import kvpage
from kvpage import Calibration, DeviceConfig

NAME = "no device: this machine's CPU"
UNTIMED = 1e-6
"""Seconds that two events are apart at least, so that a rate is a number."""


class FakeEvent:
    """As torch.cuda.Event, by the host's clock."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._at = 0.0

    def record(self, stream: object = None) -> None:
        """Note the time."""
        self._at = time.perf_counter()

    def query(self) -> bool:
        """Tell whether the device is past it: never yet, so that a clock takes its launches for hidden."""
        return False

    def synchronize(self) -> None:
        """Wait for nothing."""

    def elapsed_time(self, end: "FakeEvent") -> float:
        """Return milliseconds. end: a later event."""
        return 1e3 * max(end._at - self._at, UNTIMED)


class OnCpu(TorchFunctionMode):
    """Makes tensors in host memory where a script asks for the device or for pinned memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0].clone()
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        kwargs = {name: _on_cpu(value) for name, value in (kwargs or {}).items() if name != "pin_memory"}
        return func(*map(_on_cpu, args), **kwargs)


def _on_cpu(value: Any) -> Any:
    is_device = isinstance(value, torch.device) or (isinstance(value, str) and value.startswith("cuda"))
    return torch.device("cpu") if is_device and torch.device(value).type == "cuda" else value


def calibrate(device: str = "cuda", max_groups: int = 16) -> Calibration:
    """Stand for kvpage.calibrate, with its arguments."""
    return Calibration(NAME, max_groups, (), (), max_bytes_in=0, max_bytes_out=0, seconds=0.0)


@contextlib.contextmanager
def fake_cuda() -> Iterator[None]:
    """Stand in for a GPU inside."""
    built = {**kvpage.build_info(), "cuda_error": None}
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "get_device_name": lambda device=None: NAME,
        "synchronize": lambda device=None: None,
        "Event": FakeEvent,
        "_sleep": lambda cycles: None,
    }
    own: dict[str, Any] = {
        "calibrate": calibrate,
        "build_info": lambda: built,
        "DeviceConfig": lambda device: DeviceConfig("cpu"),
    }
    with contextlib.ExitStack() as stack:
        for module, stand_ins in ((torch.cuda, answers), (kvpage, own)):
            for name, stand_in in stand_ins.items():
                stack.enter_context(mock.patch.object(module, name, stand_in))
        stack.enter_context(OnCpu())
        yield


def run(script: str, arguments: Sequence[str]) -> None:
    """Run a script as `python script arguments` would on a machine with a device."""
    with fake_cuda(), mock.patch.object(sys, "argv", [script, *arguments]):
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2:])

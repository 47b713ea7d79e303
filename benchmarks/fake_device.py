"""A device that is not there: Triton compiles for it, launches are only kept, and tensors in host memory count as its.

    with fake_device() as device:                   torch.cuda and Triton's driver are replaced meanwhile
        cache = device.bound(tensor, layout)        a BoundCache whose operations take the way of a GPU
        ops.reshape_and_cache(key, value, cache, slots)
        device.launches                             [(kernel, grid, arguments), ...]

So the host's part of a call can be run, counted and timed on any machine.
"""

import contextlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from triton.runtime import JITFunction, driver

from kvpage import CacheLayout, ops
from kvpage.benchmarks.compiling_driver import SHARED_MEMORY, CompilingDriver, Launch
from kvpage.kernels import attention_launch, chunk, gather, rotary
from kvpage.kernels import blend as blend_kernels
from kvpage.kernels.prepared import PreparedKinds
from kvpage.ops.cuda import attention, blend, chunks, rows
from kvpage.ops.cuda.gathers import Gathers
from kvpage.ops.cuda.launches import Launches

NUMBER = 97  # of the device; no test's
MULTIPROCESSORS = {80: 108, 90: 132}  # of an A100 and an H200, by their capability
CPU = torch.device("cpu")
KERNELS_PACKAGE = "kvpage.kernels."
KERNELS: tuple[Any, ...] = attention_launch, blend_kernels, chunk, gather, rotary  # each keeps what it has launched


class FakeDevice(CompilingDriver):
    """Triton's driver of a device. `launches` is kept while `keeps` is true. capability: 80 or 90."""

    def __init__(self, capability: int = 90) -> None:
        super().__init__(NUMBER, capability, MULTIPROCESSORS[capability])
        self.launches: list[tuple[str, tuple[int, int, int], list[Any]]] = []
        self.sequences: list[ops.Sequences] = []
        self.keeps = True
        self.facts = MULTIPROCESSORS[capability], capability, SHARED_MEMORY[capability]

    def take(self, launch: Launch, source: Any, metadata: Any) -> None:
        if self.keeps:
            function, grid, _, arguments = launch
            places = [value.data_ptr() if isinstance(value, torch.Tensor) else value or 0 for value in arguments]
            self.launches.append((function, grid, places))

    def bound(self, tensor: torch.Tensor, layout: CacheLayout) -> ops.BoundCache:
        """Return a cache whose operations launch kernels."""
        cache = ops.BoundCache(tensor, layout)
        cache.is_cuda = True
        return cache

    def forget(self) -> None:
        """Let the next launch of each kernel be the first, and those of `sequences`."""
        for each in self.sequences:
            each.launches.clear()
        for module in KERNELS:
            module._kinds = PreparedKinds()
        attention_launch._plans = PreparedKinds()
        rows._launches, rows._gathers = Launches(), Gathers()


_STATE = [
    *((module, "_kinds") for module in KERNELS),
    *((rows, "_launches"), (rows, "_gathers"), (attention_launch, "_plans")),
]


@contextlib.contextmanager
def fake_device(capability: int = 90) -> Iterator[FakeDevice]:
    """Stand in for a GPU, its error word and its facts inside. capability: 80 or 90."""
    device, word = FakeDevice(capability), torch.zeros(1, dtype=torch.int32)
    kept = [(module, name, getattr(module, name)) for module, name in _STATE]
    stream = SimpleNamespace(cuda_stream=7)
    driver.set_active(device)
    with contextlib.ExitStack() as stack:
        for name, answer in {
            "current_device": lambda: CPU.index,
            "device": lambda device: contextlib.nullcontext(),
            "current_stream": lambda device=None: stream,
            "is_current_stream_capturing": lambda: False,
        }.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        for module in (rows, chunks, blend):
            stack.enter_context(mock.patch.object(module, "_error_word", lambda device: word))
        stack.enter_context(mock.patch.dict(rows._error_words, {CPU: word}))
        stack.enter_context(mock.patch.object(attention, "_facts", lambda _: device.facts))
        device.forget()
        try:
            yield device
        finally:
            for module, name, value in kept:
                setattr(module, name, value)
            _forget_code()
            if torch.cuda.is_available():  # there is no other to go back to where it is not
                driver.reset_active()


def _forget_code() -> None:
    """Drop what was compiled for the fake: its launches would go to this one for ever."""
    for name, module in list(sys.modules.items()):
        if name.startswith(KERNELS_PACKAGE):
            for kernel in vars(module).values():
                if isinstance(kernel, JITFunction):
                    kernel.device_caches.pop(NUMBER, None)

"""A GPU of each architecture, on which the kernels that Triton has compiled are run by the CPU."""

import contextlib
import gc
import os

import pytest
import torch
from support.ptx.archs import BOTH

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # the interpreter of Triton replaces its compiler


@pytest.fixture(scope="session")
def devices():
    """One of each architecture for all tests: a kernel is compiled once for each."""
    pytest.importorskip("triton")
    if INTERPRETED:
        pytest.skip("the interpreter replaces the compiler")
    from support.ptx.device import Device

    gc.collect()
    gc.freeze()  # a launch looks for tensors by their addresses: never among what torch and Triton have made
    yield {arch: Device(arch) for arch in BOTH}
    gc.unfreeze()


@pytest.fixture(params=BOTH, ids="sm_{}".format)
def device(request, devices):
    """The device to which launches go in this test."""
    from triton.runtime import driver

    driver.set_active(devices[request.param])
    yield devices[request.param]
    if torch.cuda.is_available():  # there is no other to go back to where it is not
        driver.reset_active()


@pytest.fixture
def cpu_as_device(monkeypatch, device):
    """Answer for the CPU what attention's callers ask of a CUDA device. Gives the error word and the facts."""
    from kvpage.benchmarks.compiling_driver import SHARED_MEMORY
    from kvpage.ops.cuda import attention as attention_ops_cuda
    from kvpage.ops.cuda import rows as token_ops_cuda

    state = {"error": torch.zeros(1, dtype=torch.int32), "facts": (4, device.arch, SHARED_MEMORY[device.arch])}
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(token_ops_cuda, "_error_word", lambda device: state["error"])
    monkeypatch.setattr(attention_ops_cuda, "_facts", lambda device: state["facts"])
    return state

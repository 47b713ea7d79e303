"""The CPU stands in for the device where Triton's interpreter runs the kernels."""

import contextlib

import pytest
import torch
from support.kernel_calls import INTERPRETED

from kvpage.ops.cuda import attention as attention_ops_cuda
from kvpage.ops.cuda import rows as token_ops_cuda


@pytest.fixture
def cpu_as_device(monkeypatch):
    """Answer for the CPU what the kernels' callers ask of a CUDA device. Gives the error word and the facts."""
    if not INTERPRETED:
        yield None
        return
    from kvpage.kernels import attention_launch

    state = {"error": torch.zeros(1, dtype=torch.int32), "facts": (4, 90, 227 * 1024)}
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(token_ops_cuda, "_error_word", lambda device: state["error"])
    monkeypatch.setattr(attention_ops_cuda, "_facts", lambda device: state["facts"])
    # The interpreter multiplies the bits of bf16.
    compute = attention_launch._COMPUTE
    monkeypatch.setitem(compute, torch.bfloat16, compute[torch.float32])
    yield state

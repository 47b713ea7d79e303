"""Caches in which each element has a bit pattern of its own, with rows, slots and tables for them."""

import itertools

import pytest
import torch
from support.kernel_calls import device_of

from kvpage import CacheLayout

BLOCK = 4
LAYOUTS = list(itertools.product(("flash", "flashinfer"), ("NHD", "HND"), ("separate", "packed")))
ALL_LAYOUTS = pytest.mark.parametrize("backend, kv_layout, layer_layout", LAYOUTS)


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def make_layout(
    backend="flash", kv_layout="NHD", layer_layout="separate", heads=3, size=10, dtype=torch.float32, block=BLOCK
):
    return CacheLayout(block, heads, size, dtype, backend, kv_layout, layer_layout)


def poisoned(layout, num_blocks, device="cpu"):
    """The second of three layers' caches and all of their memory, every element a NaN of its own bit pattern."""
    caches = layout.allocate(num_blocks, 3, torch.device(device))
    memory = [bits(cache) for cache in caches]
    base = {2: 0x7F81, 4: 0x7FC00000, 8: 0x7FC00000}[layout.dtype.itemsize]
    for i, view in enumerate(memory):
        view.copy_((torch.arange(view.numel(), device=device).reshape(view.shape) + i) % 64 + base)
    return caches[1], memory


def bits(tensor):
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def random_rows(num_tokens, layout, size):
    return torch.randn(num_tokens, layout.num_kv_heads, size).to(layout.dtype)


def random_slots(num_tokens, num_blocks, layout, padding=2):
    """A random choice of slots, each named once, with `padding` tokens more that go nowhere."""
    slots = torch.randperm(num_blocks * layout.block_size)[:num_tokens]
    return torch.cat([slots, torch.full((padding,), -1)])[torch.randperm(num_tokens + padding)]


def negated(tensor):
    """The same numbers in a view that torch negates when it reads: in memory they have the other sign."""
    view = torch._neg_view(tensor.neg())
    assert view.is_neg() and torch.equal(view, tensor)
    return view


def random_tables(lengths, num_blocks, layout, starts=None, width=None):
    """A block table for each sequence over distinct blocks, huge ids wherever no wanted token lies."""
    starts = starts or [0] * len(lengths)
    width = width or max((-(-(s + n) // layout.block_size) for s, n in zip(starts, lengths, strict=True)), default=0)
    tables = torch.full((len(lengths), width), 2**31 - 1, dtype=torch.int32)
    free = torch.randperm(num_blocks).tolist()
    for table, start, length in zip(tables, starts, lengths, strict=True):
        for i in range(start // layout.block_size, -(-(start + length) // layout.block_size) if length else 0):
            table[i] = free.pop()
    return tables


def filled(layout, num_blocks, where="cpu"):
    cache, _ = poisoned(layout, num_blocks, device_of(where))
    cache.copy_(torch.randn(cache.shape).to(layout.dtype))
    return cache

"""Rows of caches on devices: ids that live there, and the ways without Triton or without a device."""

import warnings

import pytest
import torch
from support.kernel_calls import ON_KERNELS, check_reported, device_of, gather, reshape
from support.row_caches import (
    bits,
    filled,
    make_layout,
    poisoned,
    random_rows,
    random_slots,
    random_tables,
    two_threads,  # noqa: F401, a fixture for all that is here
)

from kvpage import ops
from kvpage.ops import reference
from kvpage.ops.cuda import rows as token_ops_cuda


@ON_KERNELS
def test_a_bad_slot_on_the_device_is_skipped_and_reported(where):
    torch.manual_seed(11)
    layout, device = make_layout(), device_of(where)
    cache, memory = poisoned(layout, 5, device)
    expected, expected_memory = poisoned(layout, 5, device)
    slots = torch.tensor([3, 20, 7, -2, 1 << 62, -1, 19], device=device)
    good = torch.tensor([3, -1, 7, -1, -1, -1, 19], device=device)
    key, value = (random_rows(7, layout, 10).to(device) for _ in range(2))
    error = reshape(where, key, value, cache, slots, layout)
    reference.reshape_and_cache(key, value, expected, good, layout)
    assert all(torch.equal(got, want) for got, want in zip(memory, expected_memory, strict=True))
    check_reported(where, error, 1, "slot")


@ON_KERNELS
@pytest.mark.parametrize("bad", [-1, 5, 2**31 - 1, -(2**31)])
def test_a_bad_block_on_the_device_is_skipped_and_reported(where, bad):
    torch.manual_seed(12)
    layout, device = make_layout(), device_of(where)
    cache = filled(layout, 5, where)
    tables = torch.tensor([[4, bad, 2], [1, 0, bad]], dtype=torch.int32, device=device)
    out = tuple(torch.full((17, 3, 10), float("nan"), device=device) for _ in range(2))
    error = gather(where, cache, tables, [10, 7], layout, out=out)[-1]
    safe = torch.tensor([[4, 0, 2], [1, 0, 0]], dtype=torch.int32, device=device)
    for rows, want in zip(out, reference.gather_cache(cache, safe, torch.tensor([10, 7]), layout), strict=True):
        want[4:8] = float("nan")
        assert torch.equal(bits(rows), bits(want))
    check_reported(where, error, 2, "block id")


@pytest.fixture
def without_triton(monkeypatch):
    monkeypatch.setattr(token_ops_cuda, "_has_triton", lambda: False)


def test_reshape_by_torch(without_triton):
    torch.manual_seed(13)
    layout = make_layout()
    cache, memory = poisoned(layout, 5)
    slots = random_slots(9, 5, layout)
    key, value = (random_rows(len(slots), layout, size) for size in (10, 6))
    before, bound = [view.clone() for view in memory], ops.BoundCache(cache, layout)
    for bad in (-2, 20):
        with pytest.raises(ValueError, match=f"got {bad}"):
            token_ops_cuda.reshape_and_cache(key, value, bound, slots.index_fill(0, torch.tensor(3), bad))
    assert all(torch.equal(view, old) for view, old in zip(memory, before, strict=True))
    token_ops_cuda.reshape_and_cache(key, value, bound, slots)
    got = [view.clone() for view in memory]
    for view, old in zip(memory, before, strict=True):
        view.copy_(old)
    ops.reshape_and_cache(key, value, cache, slots, layout)
    assert all(torch.equal(view, want) for view, want in zip(got, memory, strict=True))


@pytest.mark.parametrize("padded", [False, True])
def test_gather_by_torch(without_triton, padded):
    torch.manual_seed(14)
    layout, lengths, starts = make_layout(), [5, 0, 8], [3, 2, 0]
    cache, tables = filled(layout, 12), random_tables(lengths, 12, layout, starts)
    shape = [3, 9, 3] if padded else [13, 3]
    outs = [[torch.full([*shape, size], float("nan")) for size in (10, 6)] for _ in range(2)]
    token_ops_cuda.gather_cache(ops.BoundCache(cache, layout), tables, lengths, starts, outs[0])
    ops.gather_cache(cache, tables, lengths, layout, starts, outs[1])
    assert all(torch.equal(bits(rows), bits(want)) for rows, want in zip(*outs, strict=True))
    tables[2, 1] = 12
    with pytest.raises(ValueError, match="got 12"):
        token_ops_cuda.gather_cache(ops.BoundCache(cache, layout), tables, lengths, starts, outs[0])
    assert all(torch.equal(bits(rows), bits(want)) for rows, want in zip(*outs, strict=True))


def test_the_lack_of_triton_is_told_once(monkeypatch):
    monkeypatch.setattr(token_ops_cuda.importlib.util, "find_spec", lambda name: None)
    token_ops_cuda._has_triton.cache_clear()
    with pytest.warns(UserWarning, match="triton is not installed"):
        assert not token_ops_cuda._has_triton()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not token_ops_cuda._has_triton()
    token_ops_cuda._has_triton.cache_clear()


def test_a_cache_that_is_nowhere_is_refused():
    layout = make_layout()
    cache, rows = torch.empty(layout.shape(2), device="meta"), torch.empty(1, 3, 10, device="meta")
    with pytest.raises(ValueError, match="CPU or a CUDA"):
        ops.reshape_and_cache(rows, rows, cache, torch.empty(1, dtype=torch.int64, device="meta"), layout)
    with pytest.raises(ValueError, match="CPU or a CUDA"):
        ops.gather_cache(cache, torch.empty(1, 1, dtype=torch.int32, device="meta"), [1], layout)


def test_check_device_takes_a_cuda_device():
    with pytest.raises(ValueError, match="must be a CUDA device, got cpu"):
        ops.check_device("cpu")

"""Heads of new tokens and sums of residuals, run by Triton's interpreter: as kernels that do the same one by one."""

import itertools

import pytest
import torch
from support.kernel_calls import INTERPRETED

pytest.importorskip("triton")
if not INTERPRETED:
    pytest.skip("the interpreter runs them", allow_module_level=True)

from kvpage import CacheLayout, KVScales
from kvpage.kernels.arguments import BAD_SLOT
from kvpage.layout.row_norm import RowNorm
from kvpage.ops import BoundCache, reference
from kvpage.ops.cuda.layers import device_add_norm, device_heads, device_rms_norm, device_rope

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
BLOCK_SIZE, NUM_BLOCKS = 4, 4
NUM_HEADS, NUM_QUERY_HEADS = 2, 6
SLOTS = [5, 3, -1, 0, 15, 14]  # of up to six tokens, of 16
POISON = 0x55


@pytest.fixture(autouse=True)
def device(cpu_as_device):
    """The CPU stands in for one."""
    return cpu_as_device


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def layout_of(dtype, size=16, backend="flash", value_size=None):
    return CacheLayout(BLOCK_SIZE, NUM_HEADS, size, dtype, backend=backend, value_size=value_size)


def poisoned(layout):
    cache = layout.allocate(NUM_BLOCKS, 1, torch.device("cpu"))[0]
    cache.untyped_storage().copy_(
        torch.full((cache.untyped_storage().nbytes(),), POISON, dtype=torch.uint8).untyped_storage()
    )
    return cache


def rows_of(num_tokens, size, dtype, value_size=None):
    """Query, key and value as columns of one product, then cos and sin."""
    torch.manual_seed(0)
    value_size = value_size or size
    counts = NUM_QUERY_HEADS * size, NUM_HEADS * size, NUM_HEADS * value_size
    parts = torch.randn(num_tokens, sum(counts) + 3).to(dtype)[:, :-3].split(counts, -1)
    sizes = size, size, value_size
    heads = [part.unflatten(-1, (-1, each)) for part, each in zip(parts, sizes, strict=True)]
    return *heads, *torch.randn(2, num_tokens, size).to(dtype)


def norms_of(size, dtype, offset, rounds):
    torch.manual_seed(1)
    weights = torch.randn(2, size).to(dtype)
    return RowNorm(weights[0], 1e-6, offset, rounds), RowNorm(weights[1], 1e-5, offset, rounds)


def one_by_one(query, key, value, norms, cos, sin, cache, slots, layout, scales):
    """What the separate kernels do."""
    if norms is not None:
        query, key = device_rms_norm(query, *norms[0]), device_rms_norm(key, *norms[1])
    turned = device_rope(query.transpose(0, 1)[None], key.transpose(0, 1)[None], cos[None], sin[None])
    query, key = (part[0].transpose(0, 1) for part in turned)
    reference.reshape_and_cache(key, value, cache, slots, layout, scales)
    return query


NORMS = {"none": None, "llama": (0.0, True), "gemma": (1.0, False)}


def check(num_tokens, size, dtype, layout, norms, scales=None, value_size=None):
    rows = rows_of(num_tokens, size, dtype, value_size)
    norms = None if norms is None else norms_of(size, dtype, *norms)
    slots = torch.tensor(SLOTS[:num_tokens], dtype=torch.int64)
    caches = [poisoned(layout) for _ in range(3)]
    got = device_heads(*rows[:3], norms, *rows[3:], BoundCache(caches[0], layout, scales), slots)
    want = one_by_one(*rows[:3], norms, *rows[3:], caches[1], slots, layout, scales)
    assert got.is_contiguous() and torch.equal(bits(got), bits(want))
    storages = [torch.tensor([], dtype=torch.uint8).set_(cache.untyped_storage()) for cache in caches]
    assert torch.equal(storages[0], storages[1])
    specified = reference.write_heads(*rows[:3], norms, *rows[3:], caches[2], slots, layout, scales)
    torch.testing.assert_close(got.float(), specified.float(), rtol=ROUNDING[dtype], atol=8 * ROUNDING[dtype])
    if norms is None:
        assert torch.equal(bits(got), bits(specified)) and torch.equal(storages[0], storages[2])


@pytest.mark.parametrize("norms", NORMS.values(), ids=NORMS)
@DTYPES
def test_heads_are_as_written_one_by_one(dtype, norms):
    for num_tokens in (0, 1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1):
        check(num_tokens, 16, dtype, layout_of(dtype), norms)


@pytest.mark.parametrize("size", [2, 10, 64, 96])
@DTYPES
def test_heads_of_all_sizes(size, dtype):
    for norms in (None, (1.0, True)):
        check(5, size, dtype, layout_of(dtype, size), norms)
        check(5, size, dtype, layout_of(dtype, size + 2), norms)  # the cache has wider rows


@pytest.mark.parametrize("backend", ["flash", "flashinfer", "paged"])
@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8], ids=str)
def test_heads_in_all_caches(backend, cache_dtype):
    if backend == "paged" and cache_dtype == torch.int8:
        pytest.skip("no such layout")
    dtype = torch.bfloat16
    layout = layout_of(cache_dtype or dtype, 32, backend)
    for scales in (None, KVScales.of(0.5, [2.0] * NUM_HEADS)) if cache_dtype in (torch.float8_e4m3fn,) else (None,):
        check(6, 32, dtype, layout, (0.0, True), scales)


def test_values_may_be_of_another_size():
    check(5, 16, torch.float32, layout_of(torch.float32, 16, "joint", 24), None, value_size=24)


def test_bad_slots_are_reported_and_skipped(device):
    layout, dtype = layout_of(torch.float32), torch.float32
    rows = rows_of(4, 16, dtype)
    for bad in (-2, 16, 2**40, -(2**62)):
        caches = poisoned(layout), poisoned(layout)
        device["error"].zero_()
        got = device_heads(*rows[:3], None, *rows[3:], BoundCache(caches[0], layout), torch.tensor([5, bad, -1, 0]))
        assert int(device["error"]) == BAD_SLOT
        want = one_by_one(*rows[:3], None, *rows[3:], caches[1], torch.tensor([5, -1, -1, 0]), layout, None)
        assert torch.equal(got, want) and torch.equal(bits(caches[0]), bits(caches[1]))
    device["error"].zero_()
    device_heads(*rows[:3], None, *rows[3:], BoundCache(caches[0], layout), torch.tensor([5, 1, -1, 0]))
    assert int(device["error"]) == 0


def test_unusual_heads_are_not_taken():
    layout, dtype = layout_of(torch.float32), torch.float32
    query, key, value, cos, sin = rows_of(4, 16, dtype)
    cache, slots, norms = poisoned(layout), torch.arange(4), norms_of(16, dtype, 0.0, True)
    bound, before = BoundCache(cache, layout), cache.clone()
    other = norms[0]._replace(rounds_before_weight=False)
    for case in (
        (query.half(), key, value, norms, cos, sin, bound, slots),
        (query.half(), key.half(), value.half(), None, cos.half(), sin.half(), bound, slots),
        (query, key[:, :1], value, norms, cos, sin, bound, slots),
        (query, key[..., :8], value, norms, cos, sin, bound, slots),
        (query, key, value[:, :1], norms, cos, sin, bound, slots),
        (query, key, value.repeat(1, 1, 2), norms, cos, sin, bound, slots),
        (query, key, value, (other, norms[1]), cos, sin, bound, slots),
        (query, key, value, (norms[0], norms[1]._replace(weight=torch.ones(8))), cos, sin, bound, slots),
        (query, key, value, norms, cos[:, :8], sin[:, :8], bound, slots),
        (query, key, value, norms, cos[:3], sin[:3], bound, slots),
        (query, key, value, norms, cos, sin, bound, slots.int()),
        (query, key, value, norms, cos, sin, bound, torch.arange(8)[::2]),
        (query, key, value, norms, cos, sin, bound, slots[:3]),
        (query[..., ::2], key[..., ::2], value, None, cos[:, ::2], sin[:, ::2], bound, slots),
    ):
        assert device_heads(*case) is None
    assert torch.equal(bits(cache), bits(before))


@pytest.mark.parametrize("size", [1, 16, 129, 4097])
@DTYPES
def test_sums_and_norms_are_as_computed_one_by_one(size, dtype):
    torch.manual_seed(0)
    wide, residual, weights = torch.randn(5, size + 3), torch.randn(5, size), torch.randn(2, size).to(dtype)
    x, residual = wide.to(dtype)[:, :size], residual.to(dtype)
    kinds = (None, (0.0, True), (1.0, False))
    for first, second in itertools.product(kinds, kinds):
        norms = [
            None if kind is None else RowNorm(weight, eps, *kind)
            for kind, weight, eps in zip((first, second), weights, (1e-6, 1e-2), strict=True)
        ]
        for num_rows in (0, 1, 5):
            rows = x[:num_rows]
            total, out = device_add_norm(rows[None], residual[None, :num_rows], *norms)
            want = residual[:num_rows] + (rows if norms[0] is None else device_rms_norm(rows, *norms[0]))
            assert torch.equal(bits(total[0]), bits(want)) and total.is_contiguous()
            assert (out is None) == (norms[1] is None)
            if out is not None:
                assert torch.equal(bits(out[0]), bits(device_rms_norm(want, *norms[1])))
            specified = reference.add_norm(rows, residual[:num_rows], *norms)
            for got, expected in zip((total, out), specified, strict=True):
                if got is not None:
                    torch.testing.assert_close(
                        got[0].float(), expected.float(), rtol=4 * ROUNDING[dtype], atol=8 * ROUNDING[dtype]
                    )


def test_unusual_sums_are_not_taken():
    x, weight = torch.randn(2, 3, 8), torch.ones(8)
    norm = RowNorm(weight, 1e-6, 0.0, True)
    for case in (
        (x, x[:1], None, norm),
        (x, x.half(), None, norm),
        (x.mT, x.mT, None, None),
        (x[:, ::2], x[:, ::2], None, norm),
        (x, x, norm._replace(weight=torch.ones(7)), None),
        (x, x, None, norm._replace(weight=weight.half())),
        (x, x, None, norm._replace(weight=torch.ones(16)[::2])),
        (x[..., :0], x[..., :0], None, None),
    ):
        assert device_add_norm(*case) is None

"""Every backend, layer layout and dtype: what is written comes back, quantised as the reference says."""

import itertools

import pytest
import torch

from kvpage import CacheLayout, KVScales, ops
from kvpage.layout.config import CACHE_DTYPES
from kvpage.ops import reference

PLACES = [("flash", "NHD"), ("flash", "HND"), ("flashinfer", "NHD"), ("flashinfer", "HND"), ("paged", "NHD")]
CASES = [
    *itertools.product(PLACES, ("separate", "packed")),
    *((("mla", "NHD"), kind) for kind in ("separate", "packed")),
]
DTYPES = list(CACHE_DTYPES.values())
EVERY_LAYOUT = pytest.mark.parametrize("place, layer_layout", CASES, ids=str)


def make_layout(place, layer_layout, dtype, block_size=4, heads=3, size=46):
    backend, kv_layout = place
    return CacheLayout(block_size, 1 if backend == "mla" else heads, size, dtype, backend, kv_layout, layer_layout)


def rows_of(layout, num_tokens, dtype=torch.float32):
    key = torch.randn(num_tokens, layout.num_kv_heads, layout.head_size).to(dtype)
    value = (
        None if layout.backend == "mla" else torch.randn(num_tokens, layout.num_kv_heads, layout.head_size).to(dtype)
    )
    return key, value


def expected(rows, layout, dtype):
    if rows is None:
        return None
    if layout.has_token_scales:
        return reference.dequantize_int8(*reference.quantize_int8(rows), dtype)
    if layout.is_quantized:
        one = torch.ones(1)
        return reference.dequantize_fp8(reference.quantize_fp8(rows, one, layout.dtype), one, dtype)
    return rows


@EVERY_LAYOUT
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [1, 4, 256])
def test_what_is_written_is_gathered(place, layer_layout, dtype, block_size):
    torch.manual_seed(0)
    layout = make_layout(place, layer_layout, dtype, block_size)
    num_tokens, num_blocks = 11, 14
    caches = layout.allocate(num_blocks, 3, torch.device("cpu"))
    others = [cache.clone() for cache in caches]
    rows_dtype = torch.bfloat16 if layout.is_quantized else dtype
    key, value = rows_of(layout, num_tokens, rows_dtype)
    needed = -(-num_tokens // block_size)
    table = torch.randperm(num_blocks, dtype=torch.int32)[:needed][None]
    positions = torch.arange(num_tokens)
    slots = table[0].long()[positions // block_size] * block_size + positions % block_size
    ops.reshape_and_cache(key, value, caches[1], slots, layout)
    got = ops.gather_cache(caches[1], table, [num_tokens], layout, dtype=rows_dtype)
    for rows, back in zip((key, value), got, strict=True):
        want = expected(rows, layout, rows_dtype)
        assert want is None and back is None or torch.equal(back, want)
    for layer in (0, 2):
        assert torch.equal(caches[layer].view(torch.uint8), others[layer].view(torch.uint8))


@EVERY_LAYOUT
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_of_every_layout_are_swapped_whole(place, layer_layout, dtype):
    layout = make_layout(place, layer_layout, dtype)
    src, dst = (layout.allocate(5, 2, torch.device("cpu")) for _ in range(2))
    for layer in (*src, *dst):
        layer.view(torch.uint8).random_(0, 256)
    want = [layer.clone() for layer in dst]
    pairs = torch.tensor([[0, 3], [4, 1]])
    ops.swap_blocks_layers(src, dst, pairs, layout)
    for got, expected_layer, source in zip(dst, want, src, strict=True):
        reference.swap_blocks(source, expected_layer, pairs, layout)
        assert torch.equal(got.view(torch.uint8), expected_layer.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("per_head", [False, True])
def test_scales_that_are_computed_use_the_whole_range(dtype, per_head):
    torch.manual_seed(1)
    layout = make_layout(("flash", "NHD"), "separate", dtype)
    key, value = rows_of(layout, 9)
    key[:, 1] *= 1000
    scales = KVScales.from_rows(key, value, dtype, per_head)
    assert len(scales.key) == (3 if per_head else 1)
    cache = layout.allocate(4, 1, torch.device("cpu"))[0]
    ops.reshape_and_cache(key, value, cache, torch.arange(9), layout, scales)
    raw, _ = ops.gather_cache(cache, torch.arange(4, dtype=torch.int32)[None], [9], layout, dtype=dtype)
    assert raw.float().abs().amax() == torch.finfo(dtype).max
    back, _ = ops.gather_cache(cache, torch.arange(4, dtype=torch.int32)[None], [9], layout, scales=scales)
    relative = 2.0 ** (-4 if dtype == torch.float8_e4m3fn else -3)
    tiny = scales.key.max() * torch.finfo(dtype).smallest_normal
    assert ((back - key).abs() <= relative * key.abs() + tiny).all()


def test_what_is_too_large_saturates_and_zeros_stay():
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        layout = make_layout(("flash", "NHD"), "separate", dtype, size=4)
        key = torch.tensor([1e30, -1e30, 0.0, torch.finfo(torch.float32).max]).expand(1, 3, 4).contiguous()
        cache = layout.allocate(1, 1, torch.device("cpu"))[0]
        ops.reshape_and_cache(key, key, cache, torch.tensor([2]), layout)
        back, _ = ops.gather_cache(cache, torch.zeros(1, 1, dtype=torch.int32), [1], layout, seq_starts=[2])
        most = torch.finfo(dtype).max
        assert back[0, 0].tolist() == [most, -most, 0.0, most]
    layout = make_layout(("flash", "NHD"), "separate", torch.int8, size=4)
    key = torch.tensor([[3.4e38, -3.4e38, 0, 1], [0, 0, 0, 0], [1e-45, 0, 0, -1e-45]])[None]
    cache = layout.allocate(1, 1, torch.device("cpu"))[0]
    ops.reshape_and_cache(key, key, cache, torch.tensor([0]), layout)
    back, _ = ops.gather_cache(cache, torch.zeros(1, 1, dtype=torch.int32), [1], layout)
    assert back.isfinite().all() and (back[0, 1] == 0).all() and back[0, 0, 0] == back[0, 0].max() > 3.3e38


def test_scales_are_checked_and_named():
    for wrong in (0.0, -1.0, float("nan"), float("inf"), []):
        with pytest.raises(ValueError):
            KVScales.of(wrong, 1.0)
    with pytest.raises(TypeError, match="key must be a torch.Tensor"):
        KVScales([1.0], torch.ones(1))
    assert KVScales.of(1, 2).digest() == KVScales.of(1.0, [2.0]).digest() != KVScales.of([1, 1], 2).digest()
    assert KVScales.of(1, 2).digest() != KVScales.of(2, 1).digest()
    layout = make_layout(("flash", "NHD"), "separate", torch.float8_e4m3fn)
    cache = layout.allocate(1, 1, torch.device("cpu"))[0]
    rows = torch.zeros(1, 3, 46)
    with pytest.raises(ValueError, match="must have 1 or 3 entries, got 2"):
        ops.reshape_and_cache(rows, rows, cache, torch.tensor([0]), layout, KVScales.of([1, 2], 1))
    plain = make_layout(("flash", "NHD"), "separate", torch.float32)
    cache = plain.allocate(1, 1, torch.device("cpu"))[0]
    with pytest.raises(ValueError, match="scales must be None for a cache of torch.float32"):
        ops.reshape_and_cache(rows, rows, cache, torch.tensor([0]), plain, KVScales.of(1, 1))


@EVERY_LAYOUT
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_reads_every_layout(place, layer_layout, dtype):
    torch.manual_seed(2)
    layout = make_layout(place, layer_layout, dtype, size=48)
    rows_dtype = torch.float32 if layout.is_quantized else dtype
    cache = layout.allocate(6, 1, torch.device("cpu"))[0]
    key, value = rows_of(layout, 17, rows_dtype)
    table = torch.tensor([[5, 1, 0, 4, 2]], dtype=torch.int32)
    positions = torch.arange(17)
    ops.reshape_and_cache(key, value, cache, table[0].long()[positions // 4] * 4 + positions % 4, layout)
    query = torch.randn(5, 6, 48, dtype=rows_dtype)
    given = {"query_lens": [5], "value_size": 32, "softcap": 30.0}
    got = ops.paged_attention(query, cache, table, [17], layout, **given)
    given["query_lens"] = torch.tensor([5])
    want = reference.paged_attention(query, cache, table, torch.tensor([17]), layout, **given)
    # A processor that multiplies bf16 in pairs rounds the weights to bf16, too.
    tolerance = {"rtol": 1.6e-2, "atol": 4e-3} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(got, want, **tolerance)


def test_a_layout_without_a_value_part_takes_none():
    layout = make_layout(("mla", "NHD"), "separate", torch.float32)
    cache = layout.allocate(1, 1, torch.device("cpu"))[0]
    rows = torch.zeros(1, 1, 46)
    with pytest.raises(ValueError, match="value must be None"):
        ops.reshape_and_cache(rows, rows, cache, torch.tensor([0]), layout)
    flash = make_layout(("flash", "NHD"), "separate", torch.float32)
    with pytest.raises(ValueError, match="value must be given"):
        ops.reshape_and_cache(
            torch.zeros(1, 3, 46), None, flash.allocate(1, 1, torch.device("cpu"))[0], torch.tensor([0]), flash
        )
    with pytest.raises(ValueError, match="num_kv_heads must be at most 1 for 'mla', got 2"):
        CacheLayout(4, 2, 46, torch.float32, "mla")

"""Caches of 8-bit numbers on a CPU, moved in calls large enough for tables of codes, and for stores past the cache."""

import itertools

import pytest
import torch

from kvpage import CacheLayout, KVScales, ops
from kvpage.ops import reference

E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
ROWS = pytest.mark.parametrize("row_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
LAYOUTS = pytest.mark.parametrize("backend, kv_layout", [("flash", "NHD"), ("flash", "HND"), ("paged", "NHD")])
BLOCK = 16


def scales_of(layout, kind):
    """None, one for the tensor, or one a head; 2**120 has no table."""
    if layout.dtype == INT8 or kind == "none":
        return None
    heads = layout.num_kv_heads if kind != "tensor" else 1
    key = 0.37 + torch.arange(heads) / 7
    return KVScales(key, key.flip(0) * (2.0**120 if kind == "far" else 0.01))


def poisoned(layout, num_blocks):
    cache = layout.allocate(num_blocks, 1, torch.device("cpu"))[0]
    memory = cache.view(torch.uint8)
    memory.copy_(torch.arange(memory.numel()).reshape(memory.shape) % 251)
    return cache


def slots_of(num_tokens, num_blocks):
    """Blocks in any order, a bit of padding, and three tokens that stand alone."""
    blocks = torch.randperm(num_blocks)[: -(-num_tokens // BLOCK)]
    slots = (blocks[:, None] * BLOCK + torch.arange(BLOCK)).flatten()[:num_tokens]
    slots[[5, num_tokens // 2]] = -1
    slots[[1, 2]] = slots[[2, 1]]
    return slots


def same_bytes(got, want):
    return torch.equal(got.view(torch.uint8), want.view(torch.uint8))


@ROWS
@LAYOUTS
@pytest.mark.parametrize(
    "dtype, kind", [*itertools.product((E4M3, E5M2), ("none", "tensor", "head", "far")), (INT8, "none")], ids=str
)
def test_moves_that_are_worth_tables(row_dtype, backend, kv_layout, dtype, kind):
    torch.manual_seed(0)
    layout = CacheLayout(BLOCK, 3, 80, dtype, backend, kv_layout)
    scales, slots = scales_of(layout, kind), slots_of(300, 25)
    key, value = (torch.randn(300, 3, 80).to(row_dtype) for _ in range(2))
    cache, want = poisoned(layout, 25), poisoned(layout, 25)
    ops.reshape_and_cache(key, value, cache, slots, layout, scales=scales)
    reference.reshape_and_cache(key, value, want, slots, layout, scales)
    assert same_bytes(cache, want)
    tables = (slots.clamp(min=0)[::BLOCK] // BLOCK).to(torch.int32)[None]
    got = ops.gather_cache(cache, tables, [290], layout, dtype=row_dtype, scales=scales)
    expected = reference.gather_cache(want, tables, torch.tensor([290]), layout, scales=scales, dtype=row_dtype)
    for rows, wanted in zip(got, expected, strict=True):
        torch.testing.assert_close(rows, wanted, rtol=0, atol=0, equal_nan=True)


@LAYOUTS
@pytest.mark.parametrize("dtype, head_size", [(E4M3, 128), (INT8, 128), (INT8, 126)], ids=str)
@pytest.mark.parametrize("row_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_large_move_is_many_small_ones(backend, kv_layout, dtype, head_size, row_dtype):
    """32 MiB of K and V are written past the processor's cache; pieces of them are not. Behind 126 codes is a gap."""
    torch.manual_seed(1)
    num_tokens = 8400 * 2 // row_dtype.itemsize
    num_blocks = num_tokens // BLOCK + 9
    layout = CacheLayout(BLOCK, 8, head_size, dtype, backend, kv_layout)
    scales, slots = scales_of(layout, "head"), slots_of(num_tokens, num_blocks)
    key, value = (torch.randn(num_tokens, 8, head_size).to(row_dtype) for _ in range(2))
    cache, want = poisoned(layout, num_blocks), poisoned(layout, num_blocks)
    ops.reshape_and_cache(key, value, cache, slots, layout, scales=scales)
    for first in range(0, num_tokens, 1000):
        part = slice(first, first + 1000)
        ops.reshape_and_cache(key[part], value[part], want, slots[part], layout, scales=scales)
    assert same_bytes(cache, want)

    tables = torch.randperm(num_blocks).to(torch.int32)[None]
    padded = [torch.full((num_tokens + 1, 8, head_size), 7.0, dtype=row_dtype) for _ in range(2)]
    ops.gather_cache(cache, tables, [num_tokens], layout, out=[rows[:-1] for rows in padded], scales=scales)
    for first in range(0, num_tokens, 1000):
        num = min(1000, num_tokens - first)
        small = ops.gather_cache(cache, tables, [num], layout, seq_starts=[first], dtype=row_dtype, scales=scales)
        for rows, wanted in zip(padded, small, strict=True):
            torch.testing.assert_close(rows[first : first + num], wanted, rtol=0, atol=0, equal_nan=True)
    assert all((rows[-1] == 7).all() for rows in padded)


@LAYOUTS
@pytest.mark.parametrize("fmt", ["vllm", "huggingface"])
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_chunks_that_are_worth_tables(backend, kv_layout, fmt, dtype):
    torch.manual_seed(2)
    layout = CacheLayout(BLOCK, 3, 80, dtype, backend, kv_layout)
    scales, ids, start, num_tokens = [scales_of(layout, "head")] * 2, torch.randperm(25).to(torch.int32), 5, 300
    caches, want = ([poisoned(layout, 25) for _ in range(2)] for _ in range(2))
    rows = torch.randn(2, 2, num_tokens, 3, 80).to(torch.bfloat16)
    chunk = (rows.transpose(2, 3) if fmt == "huggingface" else rows).contiguous()
    ops.load_chunk(caches, ids, chunk, layout, start, fmt, scales)
    reference.load_chunk(want, ids, start, rows, layout, scales)
    assert all(same_bytes(*pair) for pair in zip(caches, want, strict=True))
    back, expected = torch.full_like(chunk, 7.0), torch.full_like(rows, 7.0)
    ops.store_chunk(caches, ids, back, layout, start, fmt, scales)
    reference.store_chunk(want, ids, start, expected, layout, scales)
    assert torch.equal(back.transpose(2, 3) if fmt == "huggingface" else back, expected)

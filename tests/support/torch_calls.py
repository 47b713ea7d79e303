"""Calls of each operator in torch.ops.kvpage, over caches of every kind of layout."""

import pytest
import torch
from support.sampled_rows import sampling_records

from kvpage import CacheLayout, ops

CPU = torch.device("cpu")
LAYOUTS = [
    CacheLayout(4, 2, 8, torch.float32),
    CacheLayout(4, 2, 8, torch.bfloat16, "flash", "HND", "packed"),
    CacheLayout(4, 2, 8, torch.float8_e4m3fn, "flashinfer", "NHD", "packed"),
    CacheLayout(4, 2, 8, torch.int8, "flash"),
    CacheLayout(4, 2, 8, torch.float16, "paged"),
    CacheLayout(4, 1, 8, torch.float32, "mla"),
]
EVERY_LAYOUT = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.spec)
SLOTS = torch.tensor([9, 3, -1, 21, 22])
TABLES = torch.tensor([[2, 5, 1], [4, 0, 1 << 30]], dtype=torch.int32)
LENGTHS, STARTS, QUERIES = torch.tensor([9, 6]), torch.tensor([2, 1]), torch.tensor([3, 2])
PAIRS = torch.tensor([[1, 4], [2, 0]])


def make_caches(layout, num_layers=1, device=CPU, num_blocks=6):
    """Filled with what the layout reads back as plain numbers."""
    caches = layout.allocate(num_blocks, num_layers, device)
    slots = torch.arange(num_blocks * layout.block_size, device=device)
    for cache in caches:
        key = torch.randn(len(slots), layout.num_kv_heads, layout.head_size, device=device).to(row_dtype(layout))
        ops.reshape_and_cache(key, None if layout.backend == "mla" else key.flip(0), cache, slots, layout)
    return caches


def row_dtype(layout):
    return torch.float32 if layout.is_quantized else layout.dtype


def make_rows(layout, num_tokens, device=CPU):
    key, value = torch.randn(2, num_tokens, layout.num_kv_heads, layout.head_size, device=device).to(row_dtype(layout))
    return key, None if layout.backend == "mla" else value


def make_scales(layout):
    """(key, value) where the layout takes scales."""
    return (torch.tensor([0.5]), torch.tensor([0.25, 2.0])) if layout.dtype == torch.float8_e4m3fn else (None, None)


def bits(caches):
    return [cache.contiguous().view(torch.uint8).clone() for cache in caches]


def equal_bits(caches, others):
    return all(torch.equal(a, b) for a, b in zip(bits(caches), bits(others), strict=True))


def clones(caches):
    """Caches of their own memory with the same strides."""
    return [torch.empty_strided(c.shape, c.stride(), dtype=c.dtype).copy_(c) for c in caches]


def calls(layout):
    """Name and arguments of a call of each operation, in torch's form."""
    cache, other, third = (make_caches(layout)[0] for _ in range(3))
    key, value = make_rows(layout, 5)
    out_key, out_value = make_rows(layout, 15)
    scales = make_scales(layout)
    query = torch.randn(5, 4, 8).to(row_dtype(layout))
    each = (None, None) if scales[0] is None else ([scales[0]] * 2, [scales[1]] * 2)
    chunk = torch.zeros(2, 1 if value is None else 2, 7, layout.num_kv_heads, 8, dtype=row_dtype(layout))
    by_head, ids = chunk.transpose(2, 3).contiguous(), TABLES[0]
    spec = layout.spec
    logits, positions, tokens = torch.randn(2, 300), torch.tensor([0, 7]), torch.zeros(2, dtype=torch.int32)
    return {
        "reshape_and_cache": (key, value, cache, SLOTS, spec, *scales),
        "gather_cache": (cache, TABLES, LENGTHS, STARTS, out_key, out_value, spec, *scales),
        "paged_attention": (
            query, cache, TABLES, LENGTHS, QUERIES, query.clone(), None, spec, *scales, 3, 10
        ),
        "swap_blocks": (cache, other, PAIRS, spec),
        "swap_blocks_layers": ([cache], [other], PAIRS, spec),
        "copy_blocks": ([cache, other], PAIRS, spec),
        "store_chunk": ([cache, third], ids, chunk, spec, 3, "vllm", *each),
        "load_chunk": ([cache, third], ids, by_head, spec, 2, "huggingface", *each),
        "sample_rows": (logits, sampling_records(2), positions, tokens),
    }  # fmt: skip

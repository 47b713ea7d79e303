"""Rows of K and of V of unlike sizes, side by side in one row of the cache: written, gathered and attended over."""

import pytest
import torch

from kvpage import KVScales, ops
from kvpage.layout.cache_layout import CacheLayout
from kvpage.ops import reference
from kvpage.ops.args.bound_cache import BoundCache

B, NUM_BLOCKS, HEADS = 4, 5, 2
CPU = torch.device("cpu")
SIZES = [(12, 8), (8, 12), (5, 1), (192, 128)]
DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn]


def make(dtype: torch.dtype, sizes: tuple[int, int], kv_layout: str) -> tuple[torch.Tensor, CacheLayout]:
    layout = CacheLayout(B, HEADS, sizes[0], dtype, "joint", kv_layout, value_size=sizes[1])
    (cache,) = layout.allocate(NUM_BLOCKS, 1, CPU)
    return cache, layout


def rows(num_tokens: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(num_tokens, HEADS, size).to(dtype if dtype.itemsize > 1 else torch.float32)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_as_two_caches_of_one_size_each(sizes: tuple[int, int], dtype: torch.dtype, kv_layout: str) -> None:
    """K and V come out as from caches of their own, and attention is that of a cache padded to the larger size."""
    torch.manual_seed(0)
    cache, layout = make(dtype, sizes, kv_layout)
    wide = CacheLayout(B, HEADS, max(sizes), dtype)
    (padded,) = wide.allocate(NUM_BLOCKS, 1, CPU)
    scales = KVScales.of(0.5, 0.25) if dtype == torch.float8_e4m3fn else None
    table, num_tokens = torch.tensor([[3, 0, 4]], dtype=torch.int32), 2 * B + 1
    slots = torch.tensor([int(table[0, i // B]) * B + i % B for i in range(num_tokens)])
    key, value = (rows(num_tokens, size, dtype) for size in sizes)
    for tensor, how in ((cache, layout), (padded, wide)):
        ops.reshape_and_cache(key, value, tensor, slots, how, scales)
    found = ops.gather_cache(cache, table, [num_tokens], layout, scales=scales)
    expected = ops.gather_cache(padded, table, [num_tokens], wide, scales=scales)
    assert [part.shape[2] for part in found] == list(sizes)
    for part, other, size in zip(found, expected, sizes, strict=True):
        assert torch.equal(part, other[..., :size])
    written = reference.gather_cache(cache, table, torch.tensor([num_tokens]), layout, scales=scales)
    assert all(map(torch.equal, found, written))
    query = rows(num_tokens, sizes[0], dtype).repeat(1, 2, 1)
    about = {"query_lens": [num_tokens], "scales": scales, "scale": 0.3, "sliding_window": 5}
    out = ops.paged_attention(query, cache, table, [num_tokens], layout, **about)
    other = ops.paged_attention(query, padded, table, [num_tokens], wide, value_size=sizes[1], **about)
    assert out.shape[2] == sizes[1] and torch.equal(out, other)
    unused = [block for block in range(NUM_BLOCKS) if block not in table[0]]
    assert not cache[unused].view(torch.uint8).any()


def test_rows_wider_than_their_part_are_refused_and_nothing_is_written() -> None:
    """A row of V that is as wide as K would reach into the next head's K."""
    cache, layout = make(torch.float32, (12, 8), "NHD")
    bound, slots = BoundCache(cache, layout), torch.tensor([0])
    key, value, wide = (torch.ones(1, HEADS, size) for size in (12, 8, 12))
    with pytest.raises(ValueError, match=r"value's head size must be in \[1, 8\], got 12"):
        ops.reshape_and_cache(key, wide, bound, slots)
    table = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"value's head size must be in \[1, 8\], got 12"):
        ops.gather_cache(bound, table, [1], out=(key.clone(), wide.clone()))
    with pytest.raises(ValueError, match=r"value_size must be in \[1, 8\], got 12"):
        ops.paged_attention(key, bound, table, [1], value_size=12)
    with pytest.raises(ValueError, match=r"chunk's head size must be in \[1, 8\], got 12"):
        ops.store_chunk([cache], table[0], torch.zeros(1, 2, 1, HEADS, 12), layout)
    assert not cache.any()
    ops.reshape_and_cache(key, value, bound, slots)
    assert cache[0, 0].eq(1).all() and not cache[0, 1:].any() and not cache[1:].any()


def test_a_raw_chunk_has_rows_of_one_size() -> None:
    cache, layout = make(torch.int8, (12, 8), "NHD")
    with pytest.raises(ValueError, match="chunk must not be raw int8 for rows of K and V of several sizes"):
        ops.store_chunk([cache], torch.zeros(1).int(), torch.zeros(1, 2, 1, HEADS, 16, dtype=torch.int8), layout)

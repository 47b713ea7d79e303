"""Caches, rows, scales and chunks of every place and dtype, which kernels and their reference move alike."""

import itertools

import pytest
import torch
from support.kernel_calls import INTERPRETED, device_of

from kvpage import CacheLayout, KVScales
from kvpage.layout.config import CACHE_DTYPES
from kvpage.layout.kv_scales import FP8_DTYPES

BLOCK, HEADS, SIZE, VALUE_SIZE, NUM_BLOCKS = 4, 3, 46, 33, 6
PLACES = [("flash", "NHD"), ("flash", "HND"), ("flashinfer", "NHD"), ("flashinfer", "HND"), ("paged", "NHD")]
EVERY_PLACE = [
    *itertools.product(PLACES, ("separate", "packed")),
    *((("mla", "NHD"), kind) for kind in ("separate", "packed")),
]
ROWS = (torch.float32, torch.bfloat16, torch.float16)


def make_layout(place, layer_layout="separate", dtype=torch.float32, block_size=BLOCK, size=SIZE, heads=HEADS):
    backend, kv_layout = place
    return CacheLayout(block_size, 1 if backend == "mla" else heads, size, dtype, backend, kv_layout, layer_layout)


def row_dtypes(dtype):
    if dtype in FP8_DTYPES:
        return (*ROWS, dtype)
    return ROWS if dtype == torch.int8 else (dtype,)


def every_case():
    """All places with all dtypes of caches. In the interpreter the dtypes of rows, and a flag, take turns."""
    for i, ((place, layer_layout), dtype) in enumerate(itertools.product(EVERY_PLACE, CACHE_DTYPES.values())):
        kinds = list(itertools.product(row_dtypes(dtype), (False, True)))
        for rows, flag in (kinds[(i + i // 6) % len(kinds)],) if INTERPRETED else kinds:
            yield pytest.param(
                place, layer_layout, dtype, rows, flag, id=f"{place}-{layer_layout}-{dtype}-{rows}-{flag}"
            )


EVERY_CASE = pytest.mark.parametrize("place, layer_layout, dtype, rows_dtype, flag", list(every_case()))


def noisy(layout, where="cpu", num_blocks=NUM_BLOCKS):
    """Three layers' caches of random bytes, equal each time."""
    caches = layout.allocate(num_blocks, 3, device_of(where))
    noise = torch.Generator().manual_seed(7)
    for cache in caches:
        bits = cache.view(torch.uint8)
        bits.copy_(torch.randint(256, bits.shape, generator=noise, dtype=torch.uint8))
    return caches


def given_scales(layout, where="cpu"):
    if layout.dtype not in FP8_DTYPES:
        return None
    return KVScales.of([0.3, 1.0, 70.0][: layout.num_kv_heads], 1.7, device_of(where))


def make_rows(layout, num_tokens, size, dtype, where="cpu"):
    """Of many magnitudes, with zeros, what saturates, and what becomes zero."""
    rows = torch.randn(num_tokens, layout.num_kv_heads, size) * torch.logspace(-5, 5, size)
    if num_tokens:
        rows[0, 0, :4] = torch.tensor([0.0, -0.0, 6e4, -6e4])[:size]
        rows[-1] = 0
    return rows.to(dtype).to(device_of(where))


def same_bytes(got, want):
    return torch.equal(got.cpu().view(torch.uint8), want.cpu().view(torch.uint8))


def same_numbers(got, want):
    """Bit by bit, but for the bits of a NaN."""
    got, want = got.cpu(), want.cpu()
    if got.dtype in FP8_DTYPES:
        return same_bytes(got, want)
    return torch.equal(got.isnan(), want.isnan()) and torch.equal(got.nan_to_num(3.0), want.nan_to_num(3.0))


def to_host(tensor):
    return None if tensor is None else tensor.cpu()


def make_chunk(layout, num_tokens, size, dtype, heads_first, where="cpu"):
    """[3, parts, num_tokens, heads, size] of random bits, and its memory, which is larger."""
    parts = 1 if layout.backend == "mla" else 2
    heads = layout.num_kv_heads
    shape = (3, parts, heads, num_tokens, size + 3) if heads_first else (3, parts, num_tokens, heads, size + 3)
    memory = torch.randn(shape).mul(9).to(dtype).to(device_of(where))
    return (memory.transpose(2, 3) if heads_first else memory)[..., 1 : 1 + size], memory


def chunk_scales(layout, where="cpu"):
    if layout.dtype not in FP8_DTYPES:
        return None
    heads = layout.num_kv_heads
    return [KVScales.of([0.3 + layer] * heads, 1.7 / (1 + layer), device_of(where)) for layer in range(3)]

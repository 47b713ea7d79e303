"""Rows of tokens in host memory, written and gathered by the C++ core."""

import torch

import kvpage._C as _C
from kvpage.ops.args.bound_cache import BoundCache
from kvpage.ops.args.tokens import BITS, ROW_TYPES, TokenPart, row_view

Place = tuple[int, int, int]  # address, strides of token and head in bytes


def native_parts(cache: BoundCache, key: torch.Tensor, value: torch.Tensor | None) -> list[TokenPart]:
    """K's and V's blocks with the rows [..., num_tokens, num_heads, size] to go there or come from there."""
    native = cache.native
    parts = [_part(cache, native.key_blocks, row_view(key), key.dtype, key.shape[-1], native.key_scale)]
    if value is not None:
        value_rows = row_view(value)
        parts.append(_part(cache, native.value_blocks, value_rows, value.dtype, value.shape[-1], native.value_scale))
    return parts


def _part(
    cache: BoundCache, blocks: _C.KVPart, rows: Place, dtype: torch.dtype, size: int, scale: tuple[int, int]
) -> TokenPart:
    if dtype == cache.tensor.dtype:
        return (blocks, *rows, BITS, 0, size, 0, 0)
    return (blocks, *rows, ROW_TYPES[dtype], cache.native.codec, size, *scale)

"""Queries and keys of a step rotated by their positions (RoPE), heads of both in one launch.

row  token * (query heads + key heads) + head      [ x ... | y ... ], two halves of a head

x * cos - y * sin        cos and sin have a column for each element of a head: those of x, then those of y
y * cos + x * sin        products and sums are rounded one by one, as the model's own are
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kvpage.kernels.arguments import _ROWS, MAX_TILE_ROWS, TILE_ELEMENTS
from kvpage.kernels.constants import Constants
from kvpage.kernels.prepared import Prepared, PreparedKinds
from kvpage.kernels.quantize import from_fp32, to_fp32
from kvpage.kernels.rows import rows_of_tile


@dataclass(frozen=True, slots=True)
class RopeConstants(Constants):
    """HALF: elements of half a head. COLUMNS: as many or more, a power of two. ROW: see kvpage.kernels.quantize."""

    NUM_QUERY_HEADS: int
    NUM_KEY_HEADS: int
    HALF: int
    COLUMNS: int
    TILE_ROWS: int
    ROW: str

    @property
    def NUM_HEADS(self) -> int:
        """Heads of queries and keys."""
        return self.NUM_QUERY_HEADS + self.NUM_KEY_HEADS


@triton.jit
def times(a, b, ROW: tl.constexpr):
    """Return the products, rounded to ROW."""
    return to_fp32(from_fp32(a * b, ROW), ROW)


@triton.jit
def load_half(query_ptr, query_row, key_ptr, key_row, col, is_query, is_key, mask, ROW: tl.constexpr):
    """Return [rows, COLUMNS] elements of queries and of keys in fp32."""
    queries = tl.load(query_ptr + query_row[:, None] + col, mask=is_query[:, None] & mask, other=0)
    keys = tl.load(key_ptr + key_row[:, None] + col, mask=is_key[:, None] & mask, other=0)
    return to_fp32(tl.where(is_query[:, None], queries, keys), ROW)


@triton.jit(do_not_specialize=["num_tokens"])
def rope_kernel(
    query_ptr, key_ptr,  # [tokens, heads, 2 * HALF], as integers
    cos_ptr, sin_ptr,  # [tokens, 2 * HALF]
    query_out_ptr, key_out_ptr,  # [tokens, heads, 2 * HALF], contiguous
    num_tokens,
    query_token_stride, query_head_stride, key_token_stride, key_head_stride, cos_stride, sin_stride,  # in elements
    ROPE: tl.constexpr,  # RopeConstants
):  # fmt: skip
    NUM_HEADS: tl.constexpr = ROPE.value.NUM_HEADS
    NUM_QUERY_HEADS: tl.constexpr = ROPE.value.NUM_QUERY_HEADS
    NUM_KEY_HEADS: tl.constexpr = ROPE.value.NUM_KEY_HEADS
    HALF: tl.constexpr = ROPE.value.HALF
    TILE_ROWS: tl.constexpr = ROPE.value.TILE_ROWS
    ROW: tl.constexpr = ROPE.value.ROW
    token, head, inside = rows_of_tile(tl.program_id(0), num_tokens, NUM_HEADS, TILE_ROWS, False)
    is_query = inside & (head < NUM_QUERY_HEADS)
    is_key = inside & (head >= NUM_QUERY_HEADS)
    key_head = head - NUM_QUERY_HEADS
    query_row = token * query_token_stride + head * query_head_stride
    key_row = token * key_token_stride + key_head * key_head_stride
    col = tl.arange(0, ROPE.value.COLUMNS)[None, :]
    mask = col < HALF
    x = load_half(query_ptr, query_row, key_ptr, key_row, col, is_query, is_key, mask, ROW)
    y = load_half(query_ptr, query_row, key_ptr, key_row, HALF + col, is_query, is_key, mask, ROW)
    table, known = (token * cos_stride)[:, None] + col, inside[:, None] & mask
    cos_x = to_fp32(tl.load(cos_ptr + table, mask=known, other=0), ROW)
    cos_y = to_fp32(tl.load(cos_ptr + table + HALF, mask=known, other=0), ROW)
    table = (token * sin_stride)[:, None] + col
    sin_x = to_fp32(tl.load(sin_ptr + table, mask=known, other=0), ROW)
    sin_y = to_fp32(tl.load(sin_ptr + table + HALF, mask=known, other=0), ROW)
    new_x = from_fp32(times(x, cos_x, ROW) + times(-y, sin_x, ROW), ROW)
    new_y = from_fp32(times(y, cos_y, ROW) + times(x, sin_y, ROW), ROW)
    query_out = ((token * NUM_QUERY_HEADS + head) * 2 * HALF)[:, None] + col
    tl.store(query_out_ptr + query_out, new_x, mask=is_query[:, None] & mask)
    tl.store(query_out_ptr + query_out + HALF, new_y, mask=is_query[:, None] & mask)
    key_out = ((token * NUM_KEY_HEADS + key_head) * 2 * HALF)[:, None] + col
    tl.store(key_out_ptr + key_out, new_x, mask=is_key[:, None] & mask)
    tl.store(key_out_ptr + key_out + HALF, new_y, mask=is_key[:, None] & mask)


def rope(
    query: torch.Tensor,  # [tokens, heads, size], the last dimension contiguous
    key: torch.Tensor,
    cos: torch.Tensor,  # [tokens, size], likewise
    sin: torch.Tensor,
    query_out: torch.Tensor,  # as query, contiguous
    key_out: torch.Tensor,
) -> None:
    """Write the rotated queries and keys. All are of one dtype and device."""
    num_tokens, num_query_heads, size = query.shape
    if num_tokens == 0:
        return
    strides = *query.stride()[:2], *key.stride()[:2], cos.stride(0), sin.stride(0)
    kind = query.device, query.dtype, num_query_heads, key.shape[1], size, strides
    known: tuple[RopeConstants, Prepared] | None = _kinds.get(kind)
    if known is None:
        constants = rope_constants(num_query_heads, key.shape[1], size, query.dtype)
        options = {"num_warps": 4, "enable_fp_fusion": False}  # a product and a sum round twice
        known = constants, Prepared(rope_kernel, (*strides, constants), options, 6, range(6))
        _kinds.keep(kind, known)
    constants, prepared = known
    num_tiles = triton.cdiv(num_tokens * constants.NUM_HEADS, constants.TILE_ROWS)
    prepared.launch((num_tiles, 1, 1), (query, key, cos, sin, query_out, key_out), (num_tokens,))


_kinds = PreparedKinds()


def rope_constants(num_query_heads: int, num_key_heads: int, size: int, dtype: torch.dtype) -> RopeConstants:
    """Cut heads into tiles."""
    half = size // 2
    columns = triton.next_power_of_2(half)
    tile_rows = min(max(TILE_ELEMENTS // 2 // columns, 1), MAX_TILE_ROWS)
    return RopeConstants(num_query_heads, num_key_heads, half, columns, tile_rows, _ROWS[dtype])

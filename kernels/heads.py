"""The heads of new tokens, from a product for queries, keys and values to a cache: one launch for all.

    query ─► norm ─► rotation ─► out        each with the roundings of a kernel of its own: norm.py, rope.py
    key   ─► norm ─► rotation ─► slot       quantised as the cache is: reshape.py
    value ───────────────────► slot         norms where the model has them

A program takes one head of some tokens, so that it does one of the three.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from kvpage.kernels.arguments import (
    _ROWS,
    BAD_SLOT,
    KVViews,
    RowConstants,
    cache_pointers,
    cache_strides,
    row_constants,
)
from kvpage.kernels.constants import Constants
from kvpage.kernels.norm import NormConstants, root_of, scaled
from kvpage.kernels.prepared import Prepared, PreparedKinds, form, form_of_scales
from kvpage.kernels.quantize import from_fp32, to_fp32
from kvpage.kernels.rope import times
from kvpage.kernels.rows import at, into_cache, keep_rows, report, store_rows
from kvpage.layout.kv_scales import KVScales
from kvpage.layout.row_norm import RowNorm


@dataclass(frozen=True, slots=True)
class HeadConstants(Constants):
    """How heads of tokens are cut into tiles.

    ROWS: of keys and values, and of the cache. NORM: of queries and keys, and the type of an element.
    HAS_NORMS: whether there are norms.
    """

    ROWS: RowConstants
    NORM: NormConstants
    NUM_QUERY_HEADS: int
    HAS_NORMS: bool

    @property
    def NUM_HEADS(self) -> int:
        """Heads of queries, keys and values."""
        return self.NUM_QUERY_HEADS + 2 * self.ROWS.NUM_HEADS

    @property
    def NUM_KEY_HEADS(self) -> int:
        """Heads of keys, and of values."""
        return self.ROWS.NUM_HEADS

    @property
    def HALF(self) -> int:
        """Elements of half a head."""
        return self.NORM.SIZE // 2


@triton.jit
def turned(
    ptr, row, token, inside, weight_ptr, eps, weight_offset, cos_ptr, sin_ptr, cos_stride, sin_stride,
    HEADS: tl.constexpr,
):  # fmt: skip
    """Return heads [TILE_ROWS, COLUMNS] as bits, normed where there are norms, and rotated.

    row: [TILE_ROWS] their offsets. token: [TILE_ROWS]. inside: [TILE_ROWS] whether there is such a token.
    """
    NORM: tl.constexpr = HEADS.value.NORM
    SIZE: tl.constexpr = NORM.value.SIZE
    ROW: tl.constexpr = NORM.value.ROW
    ROUNDS: tl.constexpr = NORM.value.ROUNDS
    HALF: tl.constexpr = HEADS.value.HALF
    col = tl.arange(0, NORM.value.COLUMNS)[None, :]
    partner = (col + HALF) % SIZE  # the element that rotates with this one; its numbers are loaded once more
    mask = inside[:, None] & (col < SIZE)
    x = to_fp32(tl.load(ptr + (row[:, None] + col), mask=mask, other=0), ROW)
    y = to_fp32(tl.load(ptr + (row[:, None] + partner), mask=mask, other=0), ROW)
    if HEADS.value.HAS_NORMS:
        root = root_of(x, eps, SIZE)
        weight = to_fp32(tl.load(weight_ptr + col, mask=col < SIZE, other=0), ROW) + weight_offset
        x = to_fp32(scaled(x, root, weight, ROW, ROUNDS), ROW)
        weight = to_fp32(tl.load(weight_ptr + partner, mask=col < SIZE, other=0), ROW) + weight_offset
        y = to_fp32(scaled(y, root, weight, ROW, ROUNDS), ROW)
    cos = to_fp32(tl.load(cos_ptr + ((token * cos_stride)[:, None] + col), mask=mask, other=0), ROW)
    sin = to_fp32(tl.load(sin_ptr + ((token * sin_stride)[:, None] + col), mask=mask, other=0), ROW)
    return from_fp32(times(x, cos, ROW) + times(tl.where(col < HALF, -y, y), sin, ROW), ROW)


# Arguments that change from call to call are not specialised on: each value would compile anew, amid serving.
@triton.jit(
    do_not_specialize=["num_tokens", "num_slots"],
    do_not_specialize_on_alignment=["slot_ptr", "error_ptr", "key_scale_ptr", "value_scale_ptr"],
)
def heads_kernel(
    query_ptr, key_ptr, value_ptr,  # [num_tokens, heads, size], as integers
    out_ptr,  # as queries, contiguous
    key_cache_ptr, value_cache_ptr,  # [num_blocks, BLOCK_SIZE, heads, num_runs, run_size]
    query_weight_ptr, key_weight_ptr,  # [SIZE]; or None
    cos_ptr, sin_ptr,  # [num_tokens, SIZE]
    key_scale_ptr, value_scale_ptr,  # fp32: the cache's own, or given ones; or None
    slot_ptr,  # int64 [num_tokens]
    error_ptr,  # int32 [1]
    num_tokens, num_slots,
    query_eps, query_weight_offset, key_eps, key_weight_offset,
    query_token_stride, query_head_stride, key_token_stride, key_head_stride,  # all strides in elements
    value_token_stride, value_head_stride, cos_stride, sin_stride,
    key_block_stride, key_offset_stride, key_cache_head_stride, key_run_stride,
    value_block_stride, value_offset_stride, value_cache_head_stride, value_run_stride,
    key_scale_block_stride, key_scale_offset_stride, key_scale_head_stride,
    value_scale_block_stride, value_scale_offset_stride, value_scale_head_stride,
    HEADS: tl.constexpr,  # HeadConstants
    BIT: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = HEADS.value.ROWS
    KEY: tl.constexpr = ROWS.value.KEY
    VALUE: tl.constexpr = ROWS.value.VALUE
    TILE_ROWS: tl.constexpr = ROWS.value.TILE_ROWS
    BLOCK_SIZE: tl.constexpr = ROWS.value.BLOCK_SIZE
    NUM_HEADS: tl.constexpr = HEADS.value.NUM_HEADS
    NUM_QUERY_HEADS: tl.constexpr = HEADS.value.NUM_QUERY_HEADS
    NUM_KEY_HEADS: tl.constexpr = HEADS.value.NUM_KEY_HEADS
    part = tl.program_id(0) % NUM_HEADS
    token = (tl.program_id(0) // NUM_HEADS).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    inside = token < num_tokens
    if part < NUM_QUERY_HEADS:
        head = part.to(tl.int64)
        row = token * query_token_stride + head * query_head_stride
        elements = turned(
            query_ptr, row, token, inside, query_weight_ptr, query_eps, query_weight_offset,
            cos_ptr, sin_ptr, cos_stride, sin_stride, HEADS,
        )  # fmt: skip
        store_rows(
            out_ptr, (token * NUM_QUERY_HEADS + head) * KEY.value.SIZE, elements, inside, KEY.value.SIZE, KEY.value.TILE
        )
    else:
        slot = tl.load(slot_ptr + token, mask=inside, other=-1)
        report((slot < -1) | (slot >= num_slots), error_ptr, BIT)
        mask = (slot >= 0) & (slot < num_slots)
        block_id = slot // BLOCK_SIZE
        offset = slot % BLOCK_SIZE
        if part < NUM_QUERY_HEADS + NUM_KEY_HEADS:
            head = (part - NUM_QUERY_HEADS).to(tl.int64)
            row = token * key_token_stride + head * key_head_stride
            elements = turned(
                key_ptr, row, token, inside, key_weight_ptr, key_eps, key_weight_offset,
                cos_ptr, sin_ptr, cos_stride, sin_stride, HEADS,
            )  # fmt: skip
            cache_row = at(block_id, offset, head, key_block_stride, key_offset_stride, key_cache_head_stride)
            scale_at = at(
                block_id, offset, head, key_scale_block_stride, key_scale_offset_stride, key_scale_head_stride
            )
            keep_rows(
                elements, key_cache_ptr, cache_row, key_run_stride, key_scale_ptr, scale_at, inside, mask, KEY, ROWS
            )  # fmt: skip
        else:
            head = (part - NUM_QUERY_HEADS - NUM_KEY_HEADS).to(tl.int64)
            row = token * value_token_stride + head * value_head_stride
            cache_row = at(block_id, offset, head, value_block_stride, value_offset_stride, value_cache_head_stride)
            scale_at = at(
                block_id, offset, head, value_scale_block_stride, value_scale_offset_stride, value_scale_head_stride
            )
            into_cache(
                value_ptr, row, value_cache_ptr, cache_row, value_run_stride, value_scale_ptr, scale_at, inside, mask,
                VALUE, ROWS,
            )  # fmt: skip


def write_heads(
    query: torch.Tensor,  # [num_tokens, num_query_heads, size], the last dimension contiguous
    key: torch.Tensor,  # [num_tokens, num_heads, size], likewise
    value: torch.Tensor,  # [num_tokens, num_heads, value_size], likewise
    norms: tuple[RowNorm, RowNorm] | None,  # of queries and of keys, which round alike
    cos: torch.Tensor,  # [num_tokens, size], likewise
    sin: torch.Tensor,
    out: torch.Tensor,  # as query, contiguous
    views: KVViews,
    slots: torch.Tensor,  # int64 [num_tokens], contiguous
    scales: KVScales | None,
    error: torch.Tensor,  # int32 [1]; gets BAD_SLOT
) -> None:
    """Write queries to `out`, keys and values to their slots. All but the cache are of one dtype."""
    num_tokens = len(query)
    if num_tokens == 0:
        return
    rounds = None if norms is None else norms[0].rounds_before_weight
    pointers = cache_pointers(views, scales)
    forms = *map(form, (query, key, value, *pointers)), form_of_scales(scales)
    kind = query.device, *forms, cos.stride(0), sin.stride(0), rounds
    known: tuple[HeadConstants, Prepared] | None = _kinds.get(kind)
    if known is None:
        constants = head_constants(query.shape[1], query.shape[2], value.shape[2], query.dtype, rounds, views)
        strides = *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], cos.stride(0), sin.stride(0)
        fixed = *strides, *cache_strides(views, scales), constants, BAD_SLOT
        known = constants, Prepared(heads_kernel, fixed, constants.ROWS.options, 10, range(10))
        _kinds.keep(kind, known)
    constants, prepared = known
    weights = (None, None) if norms is None else (norms[0].weight, norms[1].weight)
    tensors = query, key, value, out, *pointers[:2], *weights, cos, sin, *pointers[2:], slots, error
    numbers = (0.0,) * 4 if norms is None else (*norms[0][1:3], *norms[1][1:3])
    num_slots = views[0].num_blocks * constants.ROWS.BLOCK_SIZE
    num_tiles = triton.cdiv(num_tokens, constants.ROWS.TILE_ROWS) * constants.NUM_HEADS
    prepared.launch((num_tiles, 1, 1), tensors, (num_tokens, num_slots, *numbers))


_kinds = PreparedKinds()


def head_constants(
    num_query_heads: int, size: int, value_size: int, dtype: torch.dtype, rounds: bool | None, views: KVViews
) -> HeadConstants:
    """Cut heads into tiles, half as large as where rows are only moved. rounds: of norms; None for no norms."""
    rows = row_constants((size, value_size), dtype, views)
    rows = replace(rows, TILE_ROWS=max(rows.TILE_ROWS // 2, 1))
    norm = NormConstants(size, rows.KEY.TILE, rows.TILE_ROWS, _ROWS[dtype], bool(rounds))
    return HeadConstants(rows, norm, num_query_heads, rounds is not None)

"""Writing the keys and values of new tokens into the slots of a cache: one launch for both."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kvpage.kernels.arguments import BAD_SLOT, KVViews, as_bits, cache_pointers, cache_strides, row_constants
from kvpage.kernels.rows import at, into_cache, report, rows_of_tile
from kvpage.layout.kv_scales import KVScales


# Arguments that change from call to call are not specialised on: each value would compile anew, amid serving.
@triton.jit(
    do_not_specialize=["num_tokens", "num_slots"],
    do_not_specialize_on_alignment=["slot_ptr", "error_ptr", "key_scale_ptr", "value_scale_ptr"],
)
def reshape_and_cache_kernel(
    key_ptr, value_ptr,  # [num_tokens, NUM_HEADS, SIZE]; V's is None where there is none
    key_cache_ptr, value_cache_ptr,  # [num_blocks, BLOCK_SIZE, NUM_HEADS, num_runs, run_size]
    key_scale_ptr, value_scale_ptr,  # fp32: the cache's own, or given ones; or None
    slot_ptr,  # int64 [num_tokens]
    error_ptr,  # int32 [1]
    num_tokens, num_slots,
    key_token_stride, key_head_stride,  # all strides in elements
    value_token_stride, value_head_stride,
    key_block_stride, key_offset_stride, key_cache_head_stride, key_run_stride,
    value_block_stride, value_offset_stride, value_cache_head_stride, value_run_stride,
    key_scale_block_stride, key_scale_offset_stride, key_scale_head_stride,
    value_scale_block_stride, value_scale_offset_stride, value_scale_head_stride,
    ROWS: tl.constexpr,  # RowConstants
    BIT: tl.constexpr,
):  # fmt: skip
    KEY: tl.constexpr = ROWS.value.KEY
    VALUE: tl.constexpr = ROWS.value.VALUE
    NUM_HEADS: tl.constexpr = ROWS.value.NUM_HEADS
    BLOCK_SIZE: tl.constexpr = ROWS.value.BLOCK_SIZE
    token, head, inside = rows_of_tile(tl.program_id(0), num_tokens, NUM_HEADS, ROWS.value.TILE_ROWS, KEY.value.IN_RUNS)
    slot = tl.load(slot_ptr + token, mask=inside, other=-1)
    report((slot < -1) | (slot >= num_slots), error_ptr, BIT)
    wanted = (slot >= 0) & (slot < num_slots)
    block_id = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    row = token * key_token_stride + head * key_head_stride
    place = at(block_id, offset, head, key_block_stride, key_offset_stride, key_cache_head_stride)
    scale_at = at(block_id, offset, head, key_scale_block_stride, key_scale_offset_stride, key_scale_head_stride)
    into_cache(
        key_ptr, row, key_cache_ptr, place, key_run_stride, key_scale_ptr, scale_at, inside, wanted, KEY, ROWS
    )  # fmt: skip
    if VALUE.value.EXISTS:
        row = token * value_token_stride + head * value_head_stride
        place = at(block_id, offset, head, value_block_stride, value_offset_stride, value_cache_head_stride)
        scale_at = at(
            block_id, offset, head, value_scale_block_stride, value_scale_offset_stride, value_scale_head_stride
        )
        into_cache(
            value_ptr, row, value_cache_ptr, place, value_run_stride, value_scale_ptr, scale_at, inside, wanted,
            VALUE, ROWS,
        )  # fmt: skip


class Reshape(NamedTuple):
    """A launch that was made, to be made again on other addresses that are as aligned as those were."""

    compiled: Any
    grid: tuple[int, int, int]
    fixed: tuple[Any, ...]  # the kernel's arguments from num_tokens on

    def again(self, addresses: tuple[int, ...]) -> None:
        """On the current stream; addresses: the kernel's first eight arguments, 0 for None."""
        self.compiled[self.grid](*addresses, *self.fixed)


def reshape_and_cache(
    key: torch.Tensor,  # [num_tokens, num_heads, key_size]
    value: torch.Tensor | None,  # [num_tokens, num_heads, value_size]
    views: KVViews,
    slots: torch.Tensor,  # int64 [num_tokens], contiguous
    scales: KVScales | None,
    error: torch.Tensor,  # int32 [1]; gets BAD_SLOT
) -> Reshape | None:
    """None where there was nothing to do."""
    num_tokens, _, key_size = key.shape
    if num_tokens == 0:
        return None
    rows = key if value is None else value
    constants = row_constants((key_size, 0 if value is None else rows.shape[2]), key.dtype, views)
    pointers = (as_bits(key), None if value is None else as_bits(rows), *cache_pointers(views, scales), slots, error)
    fixed = (
        num_tokens,
        views[0].num_blocks * constants.BLOCK_SIZE,
        *key.stride()[:2],
        *rows.stride()[:2],
        *cache_strides(views, scales),
        constants,
        BAD_SLOT,
    )
    grid = (constants.num_tiles(num_tokens), 1, 1)
    compiled = reshape_and_cache_kernel[grid](*pointers, *fixed, **constants.options)
    return Reshape(compiled, grid, fixed)

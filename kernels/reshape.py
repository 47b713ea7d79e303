"""Writing the keys and values of new tokens into the slots of a cache: one launch for both."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvpage.kernels.arguments import (
    BAD_SLOT,
    KVViews,
    RowConstants,
    cache_pointers,
    cache_strides,
    row_constants,
)
from kvpage.kernels.prepared import Prepared
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
    mask = (slot >= 0) & (slot < num_slots)
    block_id = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    row = token * key_token_stride + head * key_head_stride
    cache_row = at(block_id, offset, head, key_block_stride, key_offset_stride, key_cache_head_stride)
    scale_at = at(block_id, offset, head, key_scale_block_stride, key_scale_offset_stride, key_scale_head_stride)
    into_cache(
        key_ptr, row, key_cache_ptr, cache_row, key_run_stride, key_scale_ptr, scale_at, inside, mask, KEY, ROWS
    )  # fmt: skip
    if VALUE.value.EXISTS:
        row = token * value_token_stride + head * value_head_stride
        cache_row = at(block_id, offset, head, value_block_stride, value_offset_stride, value_cache_head_stride)
        scale_at = at(
            block_id, offset, head, value_scale_block_stride, value_scale_offset_stride, value_scale_head_stride
        )
        into_cache(
            value_ptr, row, value_cache_ptr, cache_row, value_run_stride, value_scale_ptr, scale_at, inside, mask,
            VALUE, ROWS,
        )  # fmt: skip


class Reshape(NamedTuple):
    """A launch that can be made again, for any number of tokens."""

    constants: RowConstants
    prepared: Prepared

    def again(self, addresses: Sequence[int], num_tokens: int, num_slots: int) -> bool:
        """Launch on the current stream.

        Args:
            addresses: The kernel's first eight arguments, 0 for None.
            num_tokens: At least 1.
            num_slots: Of the cache.

        Returns:
            Whether it was launched. False, for addresses that are less aligned than most: nothing was done.
        """
        grid = self.constants.num_tiles(num_tokens), 1, 1
        return self.prepared.repeat(grid, addresses, (num_tokens, num_slots))


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
    strides = *key.stride()[:2], *rows.stride()[:2], *cache_strides(views, scales)
    prepared = Prepared(reshape_and_cache_kernel, (*strides, constants, BAD_SLOT), constants.options, 4, range(4))
    tensors = key, value, *cache_pointers(views, scales), slots, error
    numbers = num_tokens, views[0].num_blocks * constants.BLOCK_SIZE
    prepared.launch((constants.num_tiles(num_tokens), 1, 1), tensors, numbers)
    return Reshape(constants, prepared)

"""Writing the keys and values of new tokens into the slots of a cache: one launch for both."""

import torch
import triton
import triton.language as tl
from kvpage.kernels.rows import BAD_SLOT, as_bits, copy_rows, report, tile_of


# What changes from call to call is not specialised on: it would compile anew in the middle of serving.
@triton.jit(do_not_specialize=["num_rows", "num_slots"])
def reshape_and_cache_kernel(
    key_ptr,  # [num_tokens, num_heads, KEY_SIZE]
    value_ptr,  # [num_tokens, num_heads, VALUE_SIZE]
    key_cache_ptr,  # [num_blocks, BLOCK_SIZE, num_heads, head_size]
    value_cache_ptr,
    slot_ptr,  # int64 [num_tokens]
    error_ptr,  # int32 [1]
    key_token_stride,  # all strides in elements
    key_head_stride,
    value_token_stride,
    value_head_stride,
    key_block_stride,
    key_offset_stride,
    key_cache_head_stride,
    value_block_stride,
    value_offset_stride,
    value_cache_head_stride,
    num_rows,  # num_tokens * num_heads
    num_heads,
    num_slots,
    BLOCK_SIZE: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BIT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    token = row // num_heads
    head = row % num_heads
    slot = tl.load(slot_ptr + token, mask=row < num_rows, other=-1)
    report((slot < -1) | (slot >= num_slots), error_ptr, BIT)
    wanted = (slot >= 0) & (slot < num_slots)
    block_id = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    copy_rows(
        key_cache_ptr,
        block_id * key_block_stride + offset * key_offset_stride + head * key_cache_head_stride,
        key_ptr,
        token * key_token_stride + head * key_head_stride,
        wanted,
        KEY_SIZE,
        KEY_TILE,
    )
    copy_rows(
        value_cache_ptr,
        block_id * value_block_stride + offset * value_offset_stride + head * value_cache_head_stride,
        value_ptr,
        token * value_token_stride + head * value_head_stride,
        wanted,
        VALUE_SIZE,
        VALUE_TILE,
    )


def reshape_and_cache(
    key: torch.Tensor,  # [num_tokens, num_heads, key_size]
    value: torch.Tensor,  # [num_tokens, num_heads, value_size]
    key_cache: torch.Tensor,  # [num_blocks, block_size, num_heads, head_size]
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,  # int64 [num_tokens], contiguous
    error: torch.Tensor,  # int32 [1]; gets BAD_SLOT
) -> None:
    num_tokens, num_heads, key_size = key.shape
    num_blocks, block_size = key_cache.shape[:2]
    if num_tokens == 0:
        return
    constants = tile_of(key_size, value.shape[2])
    num_rows = num_tokens * num_heads
    reshape_and_cache_kernel[(triton.cdiv(num_rows, constants["TILE_ROWS"]),)](
        as_bits(key),
        as_bits(value),
        as_bits(key_cache),
        as_bits(value_cache),
        slot_mapping,
        error,
        *key.stride()[:2],
        *value.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        num_rows,
        num_heads,
        num_blocks * block_size,
        BLOCK_SIZE=block_size,
        **constants,
        BIT=BAD_SLOT,
    )

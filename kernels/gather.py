"""Reading the keys and values of sequences out of their blocks: one launch for all sequences, for both."""

import itertools

import torch
import triton
import triton.language as tl
from kvpage.kernels.rows import BAD_BLOCK, as_bits, copy_rows, report, tile_of


# What changes from call to call is not specialised on: it would compile anew in the middle of serving.
@triton.jit(do_not_specialize=["num_seqs", "tiles_per_seq", "num_blocks"])
def gather_cache_kernel(
    key_cache_ptr,  # [num_blocks, BLOCK_SIZE, num_heads, head_size]
    value_cache_ptr,
    key_ptr,  # [num_tokens, num_heads, KEY_SIZE] from each sequence's first row on
    value_ptr,
    table_ptr,  # int32 [num_seqs, max_blocks]
    sequence_ptr,  # int64 [3, num_seqs]: first token, number of tokens, first row of key and value
    error_ptr,  # int32 [1]
    key_block_stride,  # all strides in elements
    key_offset_stride,
    key_cache_head_stride,
    value_block_stride,
    value_offset_stride,
    value_cache_head_stride,
    key_seq_stride,
    key_token_stride,
    key_head_stride,
    value_seq_stride,
    value_token_stride,
    value_head_stride,
    table_stride,
    num_seqs,
    tiles_per_seq,
    num_heads,
    num_blocks,
    BLOCK_SIZE: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BIT: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    seq = program // tiles_per_seq
    start = tl.load(sequence_ptr + seq)
    length = tl.load(sequence_ptr + num_seqs + seq)
    first_row = tl.load(sequence_ptr + num_seqs + num_seqs + seq)
    row = (program % tiles_per_seq) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    token = row // num_heads
    head = row % num_heads
    inside = token < length
    position = start + token
    block_id = tl.load(table_ptr + seq * table_stride + position // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    offset = position % BLOCK_SIZE
    known = (block_id >= 0) & (block_id < num_blocks)
    report(inside & (known == 0), error_ptr, BIT)
    wanted = inside & known
    copy_rows(
        key_ptr,
        seq * key_seq_stride + (first_row + token) * key_token_stride + head * key_head_stride,
        key_cache_ptr,
        block_id * key_block_stride + offset * key_offset_stride + head * key_cache_head_stride,
        wanted,
        KEY_SIZE,
        KEY_TILE,
    )
    copy_rows(
        value_ptr,
        seq * value_seq_stride + (first_row + token) * value_token_stride + head * value_head_stride,
        value_cache_ptr,
        block_id * value_block_stride + offset * value_offset_stride + head * value_cache_head_stride,
        wanted,
        VALUE_SIZE,
        VALUE_TILE,
    )


def gather_cache(
    key_cache: torch.Tensor,  # [num_blocks, block_size, num_heads, head_size]
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,  # int32 [num_seqs, max_blocks]
    starts: list[int],  # [num_seqs]
    lengths: list[int],  # [num_seqs]
    key: torch.Tensor,  # [total_tokens, num_heads, key_size] or [num_seqs, max_len, num_heads, key_size]
    value: torch.Tensor,
    error: torch.Tensor,  # int32 [1]; gets BAD_BLOCK
) -> None:
    num_seqs, (num_blocks, block_size, num_heads) = len(lengths), key_cache.shape[:3]
    max_length = max(lengths, default=0)
    if max_length == 0:
        return
    first_rows = [0, *itertools.accumulate(lengths[:-1])] if key.dim() == 3 else [0] * num_seqs
    sequences = torch.tensor([starts, lengths, first_rows], dtype=torch.int64)
    if key.is_cuda:  # pinned, so that the copy waits for nothing
        sequences = sequences.pin_memory().to(key.device, non_blocking=True)
    constants = tile_of(key.shape[-1], value.shape[-1])
    tiles_per_seq = triton.cdiv(max_length * num_heads, constants["TILE_ROWS"])
    gather_cache_kernel[(num_seqs * tiles_per_seq,)](
        as_bits(key_cache),
        as_bits(value_cache),
        as_bits(key),
        as_bits(value),
        block_tables,
        sequences,
        error,
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        *_seq_token_head_strides(key),
        *_seq_token_head_strides(value),
        block_tables.stride(0),
        num_seqs,
        tiles_per_seq,
        num_heads,
        num_blocks,
        BLOCK_SIZE=block_size,
        **constants,
        BIT=BAD_BLOCK,
    )


def _seq_token_head_strides(rows: torch.Tensor) -> tuple[int, int, int]:
    """Elements from one to the next; sequences that follow each other are told apart by their first row alone."""
    return (0, *rows.stride()[:2]) if rows.dim() == 3 else rows.stride()[:3]

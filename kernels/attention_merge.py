"""Merging the partial results of attention whose keys were split: one row of queries a program.

    split    0    1    2   ...          their maxima, sums and weighted values, MERGED at a time, by online softmax
    out      values of all / sum of all

A row of a sequence that has one split is written already.

Where it is DEPENDENT (sm_90 on), a launch begins when all programs of the attention kernel have read their keys: it
finds its rows while those write theirs, and waits for all that they have written.
"""

import triton
import triton.language as tl

from kvpage.kernels.attention_tiles import find

MERGED = 16  # splits at a time


@triton.jit
def let_merging_begin():
    """Allow the next launch to begin. It sees what this one writes, before or after, once it has waited."""
    tl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def wait_for_attention():
    """Wait for the end of the launch before this one, and for all that it has written."""
    tl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit(
    do_not_specialize=["num_items", "num_pieces", "num_seqs", "capacity", "window"],
    do_not_specialize_on_alignment=["seq_len_ptr", "query_len_ptr"],
)
def merge_splits_kernel(
    out_ptr,  # [num_tokens, num_heads, VALUE_SIZE]
    partial_ptr,  # fp32 [num_items * TILE_TOKENS, num_heads, VALUE_SIZE]
    sum_ptr,  # fp32 [num_items * TILE_TOKENS, num_heads, 2]: maximum and sum; a sum of 0 is of a split without keys
    seq_len_ptr,  # [num_seqs], as the attention kernel's
    query_len_ptr,  # [num_seqs], or None for one each
    num_seqs,
    num_heads,
    num_items,
    num_pieces,
    capacity,
    window,
    out_token_stride,
    out_head_stride,
    MERGED: tl.constexpr,
    A: tl.constexpr,  # AttentionConstants, of the attention kernel
):
    VALUE_SIZE: tl.constexpr = A.value.VALUE_SIZE
    VALUE_TILE: tl.constexpr = A.value.VALUE_TILE
    TILE_TOKENS: tl.constexpr = A.value.TILE_TOKENS
    token = tl.program_id(0) // num_heads
    head = tl.program_id(0) % num_heads
    seq, _, first_row, first_item, num_splits = find(
        token, seq_len_ptr, query_len_ptr, num_seqs, capacity, window, num_pieces, True, True, A
    )
    if A.value.DEPENDENT:  # all programs wait: a launch after this one relies on the end of both
        wait_for_attention()
    if seq >= num_seqs:  # padding at the end
        return
    if num_splits == 1:
        return
    query = token - first_row
    item = first_item + query // TILE_TOKENS * num_splits
    largest = float("-inf")
    total = 0.0
    column = tl.arange(0, VALUE_TILE)
    values = tl.zeros([VALUE_TILE], tl.float32)
    for begin in range(0, num_splits, MERGED):
        split = begin + tl.arange(0, MERGED)
        known = (split < num_splits) & (item + split < num_items)
        row = ((item + split).to(tl.int64) * TILE_TOKENS + query % TILE_TOKENS) * num_heads + head
        sums = tl.load(sum_ptr + row * 2 + 1, mask=known, other=0.0)
        known = known & (sums != 0.0)
        largest_of = tl.load(sum_ptr + row * 2, mask=known, other=float("-inf"))
        larger = tl.maximum(largest, tl.max(largest_of, 0))
        base = tl.where(larger == float("-inf"), 0.0, larger)
        shrink = tl.exp2(largest - base)
        weight = tl.where(known, tl.exp2(largest_of - base), 0.0)
        mask = known[:, None] & (column < VALUE_SIZE)[None, :]
        partial = tl.load(partial_ptr + (row[:, None] * VALUE_SIZE + column[None, :]), mask=mask, other=0.0)
        values = values * shrink + tl.sum(partial * weight[:, None], 0)
        total = total * shrink + tl.sum(sums * weight, 0)
        largest = larger
    values = values / tl.where(total == 0.0, 1.0, total)
    out_row = token.to(tl.int64) * out_token_stride + head * out_head_stride
    tl.store(out_ptr + out_row + column, values, mask=column < VALUE_SIZE)

"""Merging the partial results of attention whose keys were split, or shared: one row of queries a program.

    split    0    1    2   ...          their maxima, sums and weighted values, MERGED at a time, by online softmax
    out      values of all / sum of all

A row of a sequence that has one split is written already. Where sequences share keys, a row has splits of its own keys,
and of those of its groups; none is written already.

Where it is DEPENDENT (sm_90 on), a launch begins when all programs of the attention kernel have read their keys: it
finds its rows while those write theirs, and waits for all that they have written.
"""

import triton
import triton.language as tl

from kvpage.kernels.attention_tiles import (
    GROUP_COUNT,
    GROUP_FIRST,
    KEY_BEGIN,
    KEY_END,
    OUTER_GROUP,
    OWN_BEGIN,
    RANK,
    find,
)

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


@triton.jit
def nothing(A: tl.constexpr):
    """Return maximum, sum and weighted values before any split."""
    VALUE_TILE: tl.constexpr = A.value.VALUE_TILE
    return tl.full([], float("-inf"), tl.float32), tl.zeros([], tl.float32), tl.zeros([VALUE_TILE], tl.float32)


@triton.jit
def add_splits(
    largest, total, values, partial_ptr, sum_ptr, item, query, head, num_heads, num_splits, num_items,
    MERGED: tl.constexpr, A: tl.constexpr,
):  # fmt: skip
    """Return the running maximum, sum and weighted values with the splits of a row. query: within the tile."""
    VALUE_SIZE: tl.constexpr = A.value.VALUE_SIZE
    VALUE_TILE: tl.constexpr = A.value.VALUE_TILE
    TILE_TOKENS: tl.constexpr = A.value.TILE_TOKENS
    column = tl.arange(0, VALUE_TILE)
    for begin in range(0, num_splits, MERGED):
        split = begin + tl.arange(0, MERGED)
        known = (split < num_splits) & (item + split < num_items)
        row = ((item + split).to(tl.int64) * TILE_TOKENS + query) * num_heads + head
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
    return largest, total, values


@triton.jit
def store_merged(out_ptr, token, head, token_stride, head_stride, total, values, A: tl.constexpr):
    """Write a row of `out`: values divided by their sum."""
    VALUE_SIZE: tl.constexpr = A.value.VALUE_SIZE
    VALUE_TILE: tl.constexpr = A.value.VALUE_TILE
    column = tl.arange(0, VALUE_TILE)
    values = values / tl.where(total == 0.0, 1.0, total)
    row = token.to(tl.int64) * token_stride + head * head_stride
    tl.store(out_ptr + row + column, values, mask=column < VALUE_SIZE)


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
    TILE_TOKENS: tl.constexpr = A.value.TILE_TOKENS
    token = tl.program_id(0) // num_heads
    head = tl.program_id(0) % num_heads
    seq, _, first_row, first_item, num_splits = find(
        token, seq_len_ptr, query_len_ptr, None, num_seqs, capacity, window, num_pieces, True, False, True, A
    )
    if A.value.DEPENDENT:  # all programs wait: a launch after this one relies on the end of both
        wait_for_attention()
    if seq >= num_seqs:  # padding at the end
        return
    if num_splits == 1:
        return
    query = token - first_row
    item = first_item + query // TILE_TOKENS * num_splits
    largest, total, values = nothing(A)
    largest, total, values = add_splits(
        largest, total, values, partial_ptr, sum_ptr, item, query % TILE_TOKENS, head, num_heads, num_splits, num_items,
        MERGED, A,
    )  # fmt: skip
    store_merged(out_ptr, token, head, out_token_stride, out_head_stride, total, values, A)


@triton.jit
def item_of_member(plan_ptr, plan_stride, seq, group, num_groups, capacity, window, num_pieces, A: tl.constexpr):
    """Return (first item of a group's tile with a sequence's query, the query within the tile, the group's splits)."""
    TILE_TOKENS: tl.constexpr = A.value.TILE_TOKENS
    _, _, _, item, num_splits = find(
        group, plan_ptr + KEY_END * plan_stride, plan_ptr + GROUP_COUNT * plan_stride,
        plan_ptr + KEY_BEGIN * plan_stride, num_groups, capacity, window, num_pieces, False, True, True, A,
    )  # fmt: skip
    rank = tl.load(plan_ptr + RANK * plan_stride + seq)
    query = (rank - tl.load(plan_ptr + GROUP_FIRST * plan_stride + group)).to(tl.int32)
    return item + query // TILE_TOKENS * num_splits, query % TILE_TOKENS, num_splits


@triton.jit(
    do_not_specialize=[
        *("num_items", "num_pieces", "num_seqs", "capacity", "window"),
        *("num_group_items", "num_group_pieces", "num_groups", "plan_stride"),
    ],
    do_not_specialize_on_alignment=["seq_len_ptr", "plan_ptr"],
)
def merge_shared_kernel(
    out_ptr,  # [num_seqs, num_heads, VALUE_SIZE]
    partial_ptr,  # these two: of own keys, as of merge_splits_kernel
    sum_ptr,
    group_partial_ptr,  # the same of shared keys, in tiles of GROUPS.TILE_TOKENS rows
    group_sum_ptr,
    seq_len_ptr,
    plan_ptr,  # int64 [9, num_seqs]: see PlanRow
    num_seqs,
    num_heads,
    num_items,
    num_pieces,
    num_groups,
    num_group_items,
    num_group_pieces,
    capacity,
    window,
    plan_stride,
    out_token_stride,
    out_head_stride,
    MERGED: tl.constexpr,
    GROUPS: tl.constexpr,  # AttentionConstants of shared keys
    A: tl.constexpr,  # AttentionConstants of own keys
):
    seq = tl.program_id(0) // num_heads
    head = tl.program_id(0) % num_heads
    _, _, _, item, num_splits = find(
        seq, seq_len_ptr, None, plan_ptr + OWN_BEGIN * plan_stride, num_seqs, capacity, window, num_pieces,
        False, True, True, A,
    )  # fmt: skip
    if A.value.DEPENDENT:
        wait_for_attention()
    largest, total, values = nothing(A)
    largest, total, values = add_splits(
        largest, total, values, partial_ptr, sum_ptr, item, 0, head, num_heads, num_splits, num_items, MERGED, A
    )
    for level in tl.static_range(2):  # the outer group, then the inner one
        group = tl.load(plan_ptr + (OUTER_GROUP + level) * plan_stride + seq).to(tl.int32)
        if (group >= 0) & (group < num_groups):
            item, query, num_splits = item_of_member(
                plan_ptr, plan_stride, seq, group, num_groups, capacity, window, num_group_pieces, GROUPS
            )
            largest, total, values = add_splits(
                largest, total, values, group_partial_ptr, group_sum_ptr, item, query, head, num_heads,
                num_splits, num_group_items, MERGED, GROUPS,
            )  # fmt: skip
    store_merged(out_ptr, seq, head, out_token_stride, out_head_stride, total, values, A)

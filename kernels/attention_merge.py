"""Merging the partial results of attention whose keys were split: one row of queries a program."""

import triton
import triton.language as tl

MERGED = 16  # splits at a time


@triton.jit(do_not_specialize=["num_seqs", "num_splits"])
def merge_splits_kernel(
    out_ptr,  # [num_tokens, num_heads, VALUE_SIZE]
    partial_ptr,  # fp32 [num_tokens * num_heads, num_splits, VALUE_SIZE]
    sum_ptr,  # fp32 [num_tokens * num_heads, num_splits, 2]: maximum and sum; a sum of 0 is of a split without keys
    query_len_ptr,  # [num_seqs], or None for one each
    num_seqs,
    num_heads,
    num_splits,
    out_token_stride,
    out_head_stride,
    VALUE_SIZE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    SPLITS_TILE: tl.constexpr,
    MERGED: tl.constexpr,
    SEARCH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token = row // num_heads
    num_queries = num_seqs
    if query_len_ptr is not None:
        num_queries = num_seqs * 0
        for begin in range(0, num_seqs, SEARCH):
            index = begin + tl.arange(0, SEARCH)
            queries = tl.load(query_len_ptr + index, mask=index < num_seqs, other=0).to(tl.int32)
            num_queries += tl.sum(tl.maximum(queries, 0), 0)
    if token >= num_queries:  # padding at the end
        return
    split = tl.arange(0, SPLITS_TILE)
    sums = sum_ptr + (row * num_splits + split) * 2
    total = tl.load(sums + 1, mask=split < num_splits, other=0.0)
    used = total != 0.0
    largest = tl.load(sums, mask=split < num_splits, other=float("-inf"))
    base = tl.max(tl.where(used, largest, float("-inf")), 0)
    base = tl.where(base == float("-inf"), 0.0, base)
    all_of = tl.sum(tl.where(used, total * tl.exp2(largest - base), 0.0), 0)

    column = tl.arange(0, VALUE_TILE)
    values = tl.zeros([VALUE_TILE], tl.float32)
    for begin in range(0, num_splits, MERGED):
        part = row * num_splits + begin + tl.arange(0, MERGED)
        known = begin + tl.arange(0, MERGED) < num_splits
        known = known & (tl.load(sum_ptr + part * 2 + 1, mask=known, other=0.0) != 0.0)
        weight = tl.exp2(tl.load(sum_ptr + part * 2, mask=known, other=0.0) - base)
        mask = known[:, None] & (column < VALUE_SIZE)[None, :]
        partial = tl.load(partial_ptr + (part[:, None] * VALUE_SIZE + column[None, :]), mask=mask, other=0.0)
        values += tl.sum(partial * tl.where(known, weight, 0.0)[:, None], 0)
    values = values / tl.where(all_of == 0.0, 1.0, all_of)
    place = token * out_token_stride + (row % num_heads) * out_head_stride
    tl.store(out_ptr + place + column, values, mask=column < VALUE_SIZE)

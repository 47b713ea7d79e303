"""Attention whose sums of a row have one order, whatever is computed beside the row: splits at fixed positions.

    keys                 0 ... 511 | 512 ... 1023 | 1024 ... 1500        a split has SPLIT_TILES tiles of keys
    one program          each split by itself, its sums added to those of the splits before
    several programs     one split each; merge_fixed_kernel adds their sums up in the same order

num_pieces is 1 for several, and 0 for one. Which it is depends on the device's occupation; the bits do not. There is
one machine code for decodes and portions of prompts of one size of tiles, but for how a row finds its sequence. Every
tile of keys is taken as one at the edge. A row that sees no key of a tile, or of a split, gets sums times 1 plus 0 from
it. So it makes no difference which tokens are in its tile of queries, nor where a window begins for them.
"""

import triton
import triton.language as tl

from kvpage.kernels.attention import attend, entries_of_tile, length_of, report_unknown, start, store_out
from kvpage.kernels.attention_rows import load_queries, whole
from kvpage.kernels.attention_tiles import find, item_of, program_of, rows_of_tile


@triton.jit
def add_split(largest, total, values, split_largest, split_total, split_values):
    """Return maximum, sum and weighted values with those of one more split: element by element."""
    larger = tl.maximum(largest, split_largest)
    base = tl.where(larger == float("-inf"), 0.0, larger)
    shrink, weight = tl.exp2(largest - base), tl.exp2(split_largest - base)
    total = total * shrink + split_total * weight
    values = values * shrink[:, None] + split_values * weight[:, None]
    return larger, total, values


@triton.jit
def tiles_of_rows(first, last_key, first_key, window, A: tl.constexpr):
    """Return (first key that any row sees, [begin, end) of the tiles of keys of all rows)."""
    TILE_KEYS: tl.constexpr = A.value.TILE_KEYS
    low = first_key
    if A.value.WINDOW:
        low = tl.maximum(first - window + 1, first_key)
    return low, low // TILE_KEYS, (tl.maximum(last_key + 1, 0) + TILE_KEYS - 1) // TILE_KEYS


@triton.jit
def row_of_split(split, token, head, num_tokens, num_heads):
    """Return the place of a row's partial result, int64."""
    return (split.to(tl.int64) * num_tokens + token) * num_heads + head


@triton.jit
def store_split(
    partial_ptr, sum_ptr, split, token, head, num_tokens, num_heads, largest, total, values, valid, A: tl.constexpr
):
    """Write rows of a split: values as they are, their maximum and their sum."""
    SIZE: tl.constexpr = A.value.VALUE_SIZE
    column = tl.arange(0, values.shape[1])
    row = row_of_split(split, token, head, num_tokens, num_heads)
    mask = valid[:, None] & (column < SIZE)[None, :]
    tl.store(partial_ptr + (row[:, None] * SIZE + column[None, :]), values, mask=mask)
    tl.store(sum_ptr + row * 2, largest, mask=valid)
    tl.store(sum_ptr + row * 2 + 1, total, mask=valid)


# As of paged_attention_kernel, whose arguments these are.
@triton.jit(
    do_not_specialize=[
        *("num_items", "num_pieces", "num_seqs", "num_tokens", "num_blocks", "capacity", "window", "table_stride"),
        "plan_stride",
    ],
    do_not_specialize_on_alignment=[
        "sink_ptr",
        "table_ptr",
        "seq_len_ptr",
        "query_len_ptr",
        "position_ptr",
        "plan_ptr",
    ],
)
def fixed_attention_kernel(
    query_ptr, out_ptr,
    key_ptr, value_ptr,
    key_scale_ptr, value_scale_ptr,
    sink_ptr,
    table_ptr,
    seq_len_ptr, query_len_ptr,
    position_ptr,
    partial_ptr,  # fp32 [splits, num_tokens, num_kv_heads * GROUP, VALUE_SIZE]; never None
    sum_ptr,  # fp32 [splits, num_tokens, num_kv_heads * GROUP, 2]
    error_ptr, plan_ptr,
    factor, softcap, window,
    num_items, num_pieces, num_kv_heads, num_seqs, num_tokens, num_blocks, capacity,
    query_token_stride, query_head_stride,
    out_token_stride, out_head_stride, table_stride, plan_stride,
    key_block_stride, key_head_stride, key_run_stride,
    value_block_stride, value_head_stride, value_run_stride,
    key_scale_block_stride, key_scale_offset_stride, key_scale_head_stride,
    value_scale_block_stride, value_scale_offset_stride, value_scale_head_stride,
    A: tl.constexpr,  # AttentionConstants
):  # fmt: skip
    TOKEN_SCALES: tl.constexpr = A.value.TOKEN_SCALES
    QUERY_ALIGN: tl.constexpr = A.value.QUERY_ALIGN
    SPLIT_TILES: tl.constexpr = A.value.SPLIT_TILES
    VALUE_PAIRS: tl.constexpr = A.value.VALUE_PAIRS
    GROUP: tl.constexpr = A.value.GROUP
    head_tile, kv_head, item = program_of(num_items, num_kv_heads, A)
    seq, num_queries, first_row, first_query, split, num_splits = item_of(
        item, seq_len_ptr, query_len_ptr, plan_ptr, plan_stride, num_seqs, capacity, window, num_pieces, True, A
    )
    if seq >= num_seqs:
        return
    length = length_of(seq, seq_len_ptr, plan_ptr, plan_stride, capacity, error_ptr, A)
    _, token, head, valid, table_row, position, first, _, first_key, limit = rows_of_tile(
        seq, seq_len_ptr, table_ptr, table_stride, position_ptr, plan_ptr, plan_stride, first_row, first_query,
        num_queries, num_tokens, length, capacity, head_tile, kv_head, A,
    )  # fmt: skip
    query_row = token.to(tl.int64) * query_token_stride + head.to(tl.int64) * query_head_stride
    query_row = tl.multiple_of(query_row, QUERY_ALIGN)
    q, q_odd, q_tail, q_tail_odd, row_factor = load_queries(query_ptr, query_row, valid, factor, A)
    if key_scale_ptr is not None and not TOKEN_SCALES:
        row_factor *= tl.load(key_scale_ptr + kv_head * key_scale_head_stride)
    low, begin_tile, end_tile = tiles_of_rows(first, limit, first_key, window, A)
    is_apart = num_pieces > 0
    first_split = tl.where(is_apart, split, begin_tile // SPLIT_TILES)
    end_split = tl.where(is_apart, split + 1, (end_tile + SPLIT_TILES - 1) // SPLIT_TILES)
    key_head, value_head = kv_head.to(tl.int64) * key_head_stride, kv_head.to(tl.int64) * value_head_stride
    # A sink counts in the first split, or before all splits where no row sees a key of that.
    largest, total, even, odd = start(sink_ptr, head, valid, tl.where(is_apart | (first_split == 0), 1, 0), A)
    values = whole(even, odd, VALUE_PAIRS)
    for number in range(first_split, end_split):
        begin = tl.maximum(number * SPLIT_TILES, begin_tile)
        end = tl.minimum((number + 1) * SPLIT_TILES, end_tile)
        split_largest, split_total, even, odd = start(sink_ptr, head, valid, number, A)
        e0, e1, e2, e3 = entries_of_tile(begin, low, tl.where(begin < end, limit, -1), table_row, A)
        for key_tile in range(begin, end):
            split_largest, split_total, even, odd = attend(
                split_largest, split_total, even, odd, q, q_odd, q_tail, q_tail_odd, row_factor, position, window,
                softcap, key_tile, e0, e1, e2, e3, low, limit, num_blocks, kv_head,
                key_ptr, key_head, key_block_stride, key_run_stride,
                value_ptr, value_head, value_block_stride, value_run_stride,
                key_scale_ptr, key_scale_block_stride, key_scale_offset_stride, key_scale_head_stride,
                value_scale_ptr, value_scale_block_stride, value_scale_offset_stride, value_scale_head_stride,
                True, A,
            )  # fmt: skip
            e0, e1, e2, e3 = entries_of_tile(key_tile + 1, low, tl.where(key_tile + 1 < end, limit, -1), table_row, A)
        split_values = whole(even, odd, VALUE_PAIRS)
        if value_scale_ptr is not None and not TOKEN_SCALES:
            split_values *= tl.load(value_scale_ptr + kv_head * value_scale_head_stride)
        largest, total, values = add_split(largest, total, values, split_largest, split_total, split_values)
    if num_splits > 1:
        num_heads = num_kv_heads * GROUP
        store_split(partial_ptr, sum_ptr, split, token, head, num_tokens, num_heads, largest, total, values, valid, A)
    else:
        store_out(out_ptr, token, head, out_token_stride, out_head_stride, total, values, valid, A)
    if (kv_head == 0) & (head_tile == 0):
        begin = tl.maximum(first_split * SPLIT_TILES, begin_tile)
        end = tl.minimum(end_split * SPLIT_TILES, end_tile)
        report_unknown(table_row, low, begin, end, limit, num_blocks, error_ptr, A)


@triton.jit(
    do_not_specialize=["num_tokens", "num_pieces", "num_seqs", "capacity", "window"],
    do_not_specialize_on_alignment=["seq_len_ptr", "query_len_ptr"],
)
def merge_fixed_kernel(
    out_ptr,  # [num_tokens, num_heads, VALUE_SIZE]
    partial_ptr, sum_ptr,  # as fixed_attention_kernel's
    seq_len_ptr, query_len_ptr,
    num_seqs, num_heads, num_tokens, num_pieces, capacity, window,
    out_token_stride, out_head_stride,
    A: tl.constexpr,  # AttentionConstants, of the attention kernel
):  # fmt: skip
    SIZE: tl.constexpr = A.value.VALUE_SIZE
    VALUE_TILE: tl.constexpr = A.value.VALUE_TILE
    token, head = tl.program_id(0) // num_heads, tl.program_id(0) % num_heads
    seq, _, _, _, num_splits = find(
        token, seq_len_ptr, query_len_ptr, None, num_seqs, capacity, window, num_pieces, True, False, True, A
    )
    if seq >= num_seqs:  # padding at the end
        return
    if num_splits == 1:  # it is written
        return
    one, column = tl.zeros([1], tl.int32), tl.arange(0, VALUE_TILE)[None, :]
    largest, total = tl.full([1], float("-inf"), tl.float32), tl.zeros([1], tl.float32)
    values = tl.zeros([1, VALUE_TILE], tl.float32)
    for split in range(0, num_splits):
        row = row_of_split(split + one, token, head, num_tokens, num_heads)
        split_values = tl.load(partial_ptr + (row[:, None] * SIZE + column), mask=column < SIZE, other=0.0)
        split_largest, split_total = tl.load(sum_ptr + row * 2), tl.load(sum_ptr + row * 2 + 1)
        largest, total, values = add_split(largest, total, values, split_largest, split_total, split_values)
    store_out(out_ptr, token + one, head + one, out_token_stride, out_head_stride, total, values, one == 0, A)

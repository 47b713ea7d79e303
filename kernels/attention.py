"""Attention over blocks in place: prefill, chunked prefill and decoding in one launch, and one more if keys are split.

    query rows of a tile            keys 0 1 2 3 4 5 6 7 8 9        tiles of 2 keys, window of 7 keys
    token 5, its heads of a group        # # # # # # . . . .        edge  [0 1]: token 7 no longer sees 0
    token 6                              # # # # # # # . . .        full  [2 3] [4 5]: no row asks what it sees
    token 7                              . # # # # # # # . .        edge  [6 7]
                                                                    [8 9] is never read

A thread block takes one tile of queries, one KV head and one split of the keys, and keeps a running maximum, a running
sum and the weighted values in fp32 (online softmax). Queries of all sequences lie one after the other; each thread
block finds its sequence by adding up the lengths, which stay on the device.

What nobody sees reaches no sum: rows that no query of the tile sees are not read, those seen by some queries only are
made finite for the others. A block id out of range is reported, and its keys count as not there.
"""

import triton
import triton.language as tl

from kvpage.kernels.attention_rows import load_queries, load_rows, load_scales, score, widen
from kvpage.kernels.attention_tiles import find_sequence, keys_of_split, positions_of_rows, program_of, queries_of_tile
from kvpage.kernels.rows import report

SEARCH = 128  # sequences at a time
MERGED = 16  # splits at a time


@triton.jit
def scaled(products, factor, softcap, SOFTCAP: tl.constexpr):
    """Scores in units of log 2. factor: of a score in these units; with a softcap, of 2 * score / softcap."""
    if SOFTCAP:
        return softcap * (1.0 - 2.0 / (1.0 + tl.exp2(products * factor)))
    else:
        return products * factor


# What changes from call to call is not specialised on: it would compile anew in the middle of serving.
@triton.jit(
    do_not_specialize=["num_tiles", "num_splits", "num_seqs", "num_tokens", "num_blocks", "capacity", "window"],
    do_not_specialize_on_alignment=["sink_ptr", "seq_len_ptr", "query_len_ptr", "position_ptr"],
)
def paged_attention_kernel(
    query_ptr,  # [num_tokens, num_kv_heads * GROUP, KEY_SIZE]
    out_ptr,  # [num_tokens, num_kv_heads * GROUP, VALUE_SIZE]
    key_ptr,  # [num_blocks, BLOCK_SIZE, num_kv_heads, runs of KEY_RUN elements]
    value_ptr,
    key_scale_ptr,  # fp32, None or [num_blocks, BLOCK_SIZE, num_kv_heads]; strides of 0 where fewer are there
    value_scale_ptr,
    sink_ptr,  # fp32 [num_kv_heads * GROUP] or None
    table_ptr,  # int32 [num_seqs, capacity / BLOCK_SIZE]
    seq_len_ptr,  # [num_seqs]
    query_len_ptr,  # [num_seqs], or None for one each
    position_ptr,  # int64 [num_tokens]: of each query in its sequence, ascending; or None for the last ones
    partial_ptr,  # fp32 [num_tokens * num_kv_heads * GROUP, num_splits, VALUE_SIZE] or None for one split
    sum_ptr,  # fp32 [num_tokens * num_kv_heads * GROUP, num_splits, 2]: maximum and sum
    error_ptr,  # int32 [1]
    factor,  # see scaled()
    softcap,
    window,
    num_tiles,
    num_splits,
    num_kv_heads,
    num_seqs,
    num_tokens,
    num_blocks,
    capacity,  # keys that a row of the table has room for
    query_token_stride,  # all strides in elements
    query_head_stride,
    out_token_stride,
    out_head_stride,
    table_stride,
    key_block_stride,
    key_offset_stride,
    key_head_stride,
    key_run_stride,
    value_block_stride,
    value_offset_stride,
    value_head_stride,
    value_run_stride,
    key_scale_block_stride,
    key_scale_offset_stride,
    key_scale_head_stride,
    value_scale_block_stride,
    value_scale_offset_stride,
    value_scale_head_stride,
    GROUP: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEY_RUN: tl.constexpr,
    VALUE_RUN: tl.constexpr,
    QUERY_ALIGN: tl.constexpr,  # elements that divide each stride
    KEY_ALIGN: tl.constexpr,
    VALUE_ALIGN: tl.constexpr,
    STORED: tl.constexpr,  # see attention_rows
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,  # of products in fp32
    NORMALIZE: tl.constexpr,  # each query by a power of two: COMPUTE's range is less than theirs
    TOKEN_SCALES: tl.constexpr,  # scales are of a token's head, not of a head
    SCALE_VALUES: tl.constexpr,  # V with these, not the weights: in fp16
    SHARED: tl.constexpr,  # V is the first VALUE_SIZE elements of each key, all within its tile
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    KEY_TILE: tl.constexpr,
    KEY_TAIL: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    MIN_SPLIT_TILES: tl.constexpr,
    SEARCH: tl.constexpr,
    BIT: tl.constexpr,
):
    HEAD_TILES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    head_tile, kv_head, split, tile = program_of(num_tiles, num_splits, num_kv_heads, HEAD_TILES)
    if query_len_ptr is None:
        seq, num_queries, first_row, first_query = tile, tile * 0 + 1, tile, tile * 0
    else:
        seq, num_queries, first_row, first_query = find_sequence(tile, query_len_ptr, num_seqs, TILE_TOKENS, SEARCH)
    if seq >= num_seqs:
        return
    asked = tl.load(seq_len_ptr + seq).to(tl.int64)
    length = tl.minimum(asked, capacity).to(tl.int32)
    report((tl.arange(0, 2) == 0) & (asked > capacity), error_ptr, BIT)

    query, token, head, valid = queries_of_tile(
        first_row, first_query, num_queries, num_tokens, head_tile, kv_head, GROUP, HEADS, TILE_ROWS, TILE_TOKENS
    )
    first, last, position = positions_of_rows(
        position_ptr, first_row, first_query, num_queries, num_tokens, length, query, token, valid, TILE_TOKENS
    )
    query_row = token.to(tl.int64) * query_token_stride + head.to(tl.int64) * query_head_stride
    query_row = tl.multiple_of(query_row, QUERY_ALIGN)
    q, q_tail, row_factor = load_queries(
        query_ptr, query_row, valid, factor, KEY_SIZE, KEY_TILE, KEY_TAIL, NORMALIZE, COMPUTE
    )
    if key_scale_ptr is not None and not TOKEN_SCALES:
        row_factor *= tl.load(key_scale_ptr + kv_head * key_scale_head_stride)

    largest = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([TILE_ROWS], tl.float32)
    if sink_ptr is not None and split == 0:  # as a key that everybody sees, of value 0
        largest = tl.load(sink_ptr + head, mask=valid, other=0.0) * 1.4426950408889634
        total += 1.0
    values = tl.zeros([TILE_ROWS, VALUE_TILE], tl.float32)

    low, begin, full_begin, full_end, end = keys_of_split(
        first, last, window, split, num_splits, WINDOW, TILE_KEYS, TILE_TOKENS, MIN_SPLIT_TILES
    )
    table_row = table_ptr + seq.to(tl.int64) * table_stride
    key_head = kv_head.to(tl.int64) * key_head_stride
    value_head = kv_head.to(tl.int64) * value_head_stride
    unknown = tl.zeros([TILE_KEYS], tl.int32)

    for phase in tl.static_range(2 if TILE_TOKENS > 1 else 1):  # what is full, and the edges
        if phase == 1:
            before, num_steps, jump = full_begin - begin, (full_begin - begin) + (end - full_end), full_end - full_begin
        else:
            before, num_steps, jump = 0, full_end - full_begin, full_begin - begin
        for step in range(0, num_steps):
            key_tile = begin + step + tl.where(step >= before, jump, 0)
            key = key_tile * TILE_KEYS + tl.arange(0, TILE_KEYS)
            inside = (key >= low) & (key <= last)
            block_id = tl.load(table_row + key // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
            offset = (key % BLOCK_SIZE).to(tl.int64)
            known = (block_id >= 0) & (block_id < num_blocks)
            unknown |= (inside & (known == 0)).to(tl.int32)
            wanted = inside & known
            key_row = block_id * key_block_stride + offset * key_offset_stride + key_head
            key_row = tl.multiple_of(key_row, KEY_ALIGN)
            scores, k = score(
                q,
                q_tail,
                key_ptr,
                key_row,
                wanted,
                key_run_stride,
                KEY_SIZE,
                KEY_TILE,
                KEY_TAIL,
                KEY_RUN,
                STORED,
                COMPUTE,
                PRECISION,
            )
            if TOKEN_SCALES:
                scores *= load_scales(
                    key_scale_ptr,
                    block_id,
                    offset,
                    kv_head,
                    key_scale_block_stride,
                    key_scale_offset_stride,
                    key_scale_head_stride,
                    wanted,
                )[None, :]
            scores = scaled(scores, row_factor[:, None], softcap, SOFTCAP)
            seen = wanted[None, :]
            if phase == 1:
                seen = seen & (key[None, :] <= position[:, None])
                if WINDOW:
                    seen = seen & (key[None, :] > position[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
            if SHARED:
                v = k
            else:
                value_row = block_id * value_block_stride + offset * value_offset_stride + value_head
                value_row = tl.multiple_of(value_row, VALUE_ALIGN)
                v = load_rows(value_ptr, value_row, wanted, value_run_stride, 0, VALUE_SIZE, VALUE_TILE, VALUE_RUN)
                v = widen(v, STORED, COMPUTE)
            if TOKEN_SCALES:
                value_scales = load_scales(
                    value_scale_ptr,
                    block_id,
                    offset,
                    kv_head,
                    value_scale_block_stride,
                    value_scale_offset_stride,
                    value_scale_head_stride,
                    wanted,
                )
                if SCALE_VALUES:  # a weight's product with a small scale would lose bits
                    v = (v.to(tl.float32) * value_scales[:, None]).to(COMPUTE)

            larger = tl.maximum(largest, tl.max(scores, 1))
            base = tl.where(larger == float("-inf"), 0.0, larger)
            shrink = tl.exp2(largest - base)
            weights = tl.exp2(scores - base[:, None])
            if phase == 1:  # 0 * inf is no 0: what is not finite spoils those who see it, and nobody else
                finite = tl.abs(v.to(tl.float32)) < float("inf")
                v = tl.where(finite, v, 0.0).to(COMPUTE)
                spoilt = tl.min(finite.to(tl.int32), 1) == 0
                weights = tl.where(seen & spoilt[None, :], float("nan"), weights)
            largest = larger
            total = total * shrink + tl.sum(weights, 1)
            if TOKEN_SCALES and not SCALE_VALUES:
                weights = tl.where(seen, weights * value_scales[None, :], 0.0)
            values = tl.dot(weights.to(COMPUTE), v, values * shrink[:, None], input_precision=PRECISION)
    report(unknown > 0, error_ptr, BIT)

    if value_scale_ptr is not None and not TOKEN_SCALES:
        values *= tl.load(value_scale_ptr + kv_head * value_scale_head_stride)
    column = tl.arange(0, VALUE_TILE)
    mask = valid[:, None] & (column < VALUE_SIZE)[None, :]
    if partial_ptr is None:
        values = values / tl.where(total == 0.0, 1.0, total)[:, None]
        out_row = token.to(tl.int64) * out_token_stride + head.to(tl.int64) * out_head_stride
        tl.store(out_ptr + (out_row[:, None] + column[None, :]), values, mask=mask)
    else:
        part = (token.to(tl.int64) * num_kv_heads * GROUP + head) * num_splits + split
        tl.store(partial_ptr + (part[:, None] * VALUE_SIZE + column[None, :]), values, mask=mask)
        tl.store(sum_ptr + part * 2, largest, mask=valid)
        tl.store(sum_ptr + part * 2 + 1, total, mask=valid)


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

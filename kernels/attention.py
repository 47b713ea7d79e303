"""Attention over blocks in place: prefill, chunked prefill or decoding in one launch, and one more if keys are split.

    query rows of a tile            keys 0 1 2 3 4 5 6 7 8 9        tiles of 2 keys, window of 7 keys
    token 5, its heads of a group        # # # # # # . . . .        edge  [0 1]: token 7 no longer sees 0
    token 6                              # # # # # # # . . .        full  [2 3] [4 5]: no row asks what it sees
    token 7                              . # # # # # # # . .        edge  [6 7]
                                                                    [8 9] is never read

A thread block takes one tile of queries, one KV head and one split of the keys (see kvpage.kernels.attention_tiles). It
keeps a running maximum, a running sum and the weighted values in fp32 (online softmax). The sequences' queries follow
each other.

Of keys that several sequences share, the queries of a tile are the last tokens of these: see
kvpage.kernels.attention_shared.

Unseen keys reach no sum: keys that no query of the tile sees are not read, and keys that only some queries see are made
finite for the others. A block id out of range is reported, and its keys count as not there. The report has a loop of
its own: in the loop over keys it would be a load that nothing hides.
"""

import triton
import triton.language as tl

from kvpage.kernels.attention_merge import let_merging_begin
from kvpage.kernels.attention_rows import load_queries, load_values, score, whole
from kvpage.kernels.attention_tiles import KEY_END, item_of, keys_of_split, program_of, rows_of_tile
from kvpage.kernels.rows import at, report


@triton.jit
def scaled(products, factor, softcap, SOFTCAP: tl.constexpr):
    """Return scores in units of log 2. factor: of a score in these units; with a softcap, of 2 * score / softcap."""
    if SOFTCAP:
        return softcap * (1.0 - 2.0 / (1.0 + tl.exp2(products * factor)))
    else:
        return products * factor


@triton.jit
def tile_of_step(step, before, jump):
    """Return the tile of keys of a step of the loop, which leaves `jump` tiles out from tile `before` on."""
    return step + tl.where(step >= before, jump, 0)


@triton.jit
def are_wanted(key, low, last, A: tl.constexpr):
    """Return whether any row may see the keys."""
    if A.value.WINDOW:
        return (key >= low) & (key <= last)
    else:
        return key <= last


@triton.jit
def are_known(entry, key, low, last, num_blocks, A: tl.constexpr):
    """Return whether the keys are wanted, and their block ids are in range. A negative id is large without its sign."""
    known = entry.to(tl.uint32, bitcast=True) < num_blocks.to(tl.uint32)
    if A.value.HAS_FEW_BLOCKS:  # an entry for many keys
        return are_wanted(key, low, tl.where(known, last, -1), A)
    else:  # a compiler takes all that follows a branch that returns
        return known


@triton.jit
def entry_of_part(begin, low, last, table_row, A: tl.constexpr):
    """Return the table's entry for the keys from `begin` on that are in one block; -1 where none is in [low, last]."""
    PART_KEYS: tl.constexpr = A.value.PART_KEYS
    return tl.load(table_row + begin // A.value.BLOCK_SIZE, mask=(begin <= last) & (begin + PART_KEYS > low), other=-1)


@triton.jit
def entries_of_tile(key_tile, low, last, table_row, A: tl.constexpr):
    """Return the table's entries for a tile: four, or one for each key and three that mean nothing.

    Of a tile with at most four blocks, each entry is a number of the whole program: it takes one register, and
    addresses of the same block differ by constants.
    """
    TILE_KEYS: tl.constexpr = A.value.TILE_KEYS
    PART_KEYS: tl.constexpr = A.value.PART_KEYS
    begin = key_tile * TILE_KEYS
    second, third, fourth = 0, 0, 0
    if A.value.HAS_FEW_BLOCKS:
        first = entry_of_part(begin, low, last, table_row, A)
        if PART_KEYS < TILE_KEYS:
            second = entry_of_part(begin + PART_KEYS, low, last, table_row, A)
        if PART_KEYS * 2 < TILE_KEYS:
            third = entry_of_part(begin + PART_KEYS * 2, low, last, table_row, A)
            fourth = entry_of_part(begin + PART_KEYS * 3, low, last, table_row, A)
    else:
        key = begin + tl.arange(0, TILE_KEYS)
        first = tl.load(table_row + key // A.value.BLOCK_SIZE, mask=are_wanted(key, low, last, A), other=-1)
    return first, second, third, fourth


@triton.jit
def entry_of_keys(first, second, third, fourth, A: tl.constexpr):
    """Return the entry of each key of a tile, or one for all, of what entries_of_tile returns."""
    TILE_KEYS: tl.constexpr = A.value.TILE_KEYS
    PART_KEYS: tl.constexpr = A.value.PART_KEYS
    if A.value.HAS_PARTS:
        part = tl.arange(0, TILE_KEYS) // PART_KEYS
        entry = tl.where(part == 0, first, second)
        if PART_KEYS * 2 < TILE_KEYS:
            entry = tl.where(part < 2, entry, tl.where(part == 2, third, fourth))
        return entry
    else:
        return first


@triton.jit
def offsets_of_tile(key_tile, A: tl.constexpr):
    """Return each key's offset in its block, int64. It is the same in all tiles that begin with a block."""
    TILE_KEYS: tl.constexpr = A.value.TILE_KEYS
    BLOCK_SIZE: tl.constexpr = A.value.BLOCK_SIZE
    if TILE_KEYS % BLOCK_SIZE == 0:
        offset = tl.arange(0, TILE_KEYS) % BLOCK_SIZE
    elif BLOCK_SIZE % TILE_KEYS == 0:
        offset = key_tile * TILE_KEYS % BLOCK_SIZE + tl.arange(0, TILE_KEYS)
    else:
        offset = (key_tile * TILE_KEYS + tl.arange(0, TILE_KEYS)) % BLOCK_SIZE
    return offset.to(tl.int64)


@triton.jit
def report_unknown(table_row, low, begin, end, last, num_blocks, error_ptr, A: tl.constexpr):
    """Report a block id out of range among the blocks of the keys of tiles [begin, end), from `low` to `last`."""
    TILE_KEYS: tl.constexpr = A.value.TILE_KEYS
    BLOCK_SIZE: tl.constexpr = A.value.BLOCK_SIZE
    IDS: tl.constexpr = A.value.IDS
    first_block = tl.maximum(begin * TILE_KEYS, low) // BLOCK_SIZE
    end_block = (tl.minimum(end * TILE_KEYS, last + 1) + BLOCK_SIZE - 1) // BLOCK_SIZE
    unknown = tl.zeros([IDS], tl.int32)
    for start_block in range(first_block, end_block, IDS):
        block = start_block + tl.arange(0, IDS)
        block_id = tl.load(table_row + block, mask=block < end_block, other=0)
        unknown |= ((block_id < 0) | (block_id >= num_blocks)).to(tl.int32)
    report(unknown > 0, error_ptr, A.value.BIT)


@triton.jit
def seen_by_rows(key, wanted, position, window, EDGE: tl.constexpr, WINDOW: tl.constexpr):
    """Return [rows, keys], or [1, keys] in a full tile: whether the row's query sees the key."""
    seen = wanted[None, :]
    if EDGE:
        seen = seen & (key[None, :] <= position[:, None])
        if WINDOW:
            seen = seen & (key[None, :] > position[:, None] - window)
    return seen


@triton.jit
def made_finite(v, COMPUTE: tl.constexpr):
    """Return the values with 0 for each that is not finite, and the keys that have such values."""
    finite = tl.abs(v.to(tl.float32)) < float("inf")
    return tl.where(finite, v, 0.0).to(COMPUTE), tl.min(finite.to(tl.int32), 1) == 0


@triton.jit
def accumulate(
    largest, total, values, values_odd, scores, v, v_odd, value_scales, seen, EDGE: tl.constexpr, A: tl.constexpr
):
    """Return the running maximum, sum and weighted values with one more tile of keys."""
    COMPUTE: tl.constexpr = A.value.COMPUTE
    PRECISION: tl.constexpr = A.value.PRECISION
    larger = tl.maximum(largest, tl.max(scores, 1))
    base = tl.where(larger == float("-inf"), 0.0, larger)
    shrink = tl.exp2(largest - base)
    weights = tl.exp2(scores - base[:, None])
    if EDGE:  # 0 * inf is not 0: a value that is not finite spoils the rows that see it, and no others
        v, spoilt = made_finite(v, COMPUTE)
        if A.value.VALUE_PAIRS:
            v_odd, also_spoilt = made_finite(v_odd, COMPUTE)
            spoilt = spoilt | also_spoilt
        weights = tl.where(seen & spoilt[None, :], float("nan"), weights)
    total = total * shrink + tl.sum(weights, 1)
    if A.value.SCALE_WEIGHTS:
        weights = tl.where(seen, weights * value_scales[None, :], 0.0)
    weights = weights.to(COMPUTE)
    values = tl.dot(weights, v, values * shrink[:, None], input_precision=PRECISION)
    if A.value.VALUE_PAIRS:
        values_odd = tl.dot(weights, v_odd, values_odd * shrink[:, None], input_precision=PRECISION)
    return larger, total, values, values_odd


@triton.jit
def store_out(out_ptr, token, head, token_stride, head_stride, total, values, valid, A: tl.constexpr):
    """Write the rows of `out`: values divided by their sum."""
    SIZE: tl.constexpr = A.value.VALUE_SIZE
    column = tl.arange(0, values.shape[1])
    mask = valid[:, None] & (column < SIZE)[None, :]
    values = values / tl.where(total == 0.0, 1.0, total)[:, None]
    row = token.to(tl.int64) * token_stride + head.to(tl.int64) * head_stride
    tl.store(out_ptr + (row[:, None] + column[None, :]), values, mask=mask)


@triton.jit
def store_partial(
    partial_ptr, sum_ptr, item, query, head, num_kv_heads, largest, total, values, valid, A: tl.constexpr
):
    """Write the rows of an item: values as they are, their maximum and their sum. query: within the tile."""
    TILE_TOKENS: tl.constexpr = A.value.TILE_TOKENS
    GROUP: tl.constexpr = A.value.GROUP
    SIZE: tl.constexpr = A.value.VALUE_SIZE
    if A.value.DEPENDENT:
        let_merging_begin()
    column = tl.arange(0, values.shape[1])
    mask = valid[:, None] & (column < SIZE)[None, :]
    row = (item.to(tl.int64) * TILE_TOKENS + query) * num_kv_heads * GROUP + head
    tl.store(partial_ptr + (row[:, None] * SIZE + column[None, :]), values, mask=mask)
    tl.store(sum_ptr + row * 2, largest, mask=valid)
    tl.store(sum_ptr + row * 2 + 1, total, mask=valid)


@triton.jit
def attend(
    largest, total, values, values_odd, q, q_odd, q_tail, q_tail_odd, row_factor, position, window, softcap,
    key_tile, first, second, third, fourth, low, last, num_blocks, kv_head,  # the former four: of entries_of_tile()
    key_ptr, key_head, key_block_stride, key_run_stride,  # key_head: offset of the KV head
    value_ptr, value_head, value_block_stride, value_run_stride,
    key_scale_ptr, key_scale_block_stride, key_scale_offset_stride, key_scale_head_stride,
    value_scale_ptr, value_scale_block_stride, value_scale_offset_stride, value_scale_head_stride,
    EDGE: tl.constexpr,  # not every row sees every key
    A: tl.constexpr,
):  # fmt: skip
    """Return the running maximum, sum and weighted values with one more tile of keys."""
    KEY_ALIGN: tl.constexpr = A.value.KEY_ALIGN
    VALUE_ALIGN: tl.constexpr = A.value.VALUE_ALIGN
    KEY_OFFSET_STRIDE: tl.constexpr = A.value.KEY_OFFSET_STRIDE
    VALUE_OFFSET_STRIDE: tl.constexpr = A.value.VALUE_OFFSET_STRIDE
    TILE_KEYS: tl.constexpr = A.value.TILE_KEYS
    key = key_tile * TILE_KEYS + tl.arange(0, TILE_KEYS)
    entry = entry_of_keys(first, second, third, fourth, A)
    known = are_known(entry, key, low, last, num_blocks, A)
    block_id, offset = entry.to(tl.int64), offsets_of_tile(key_tile, A)
    kv_head = kv_head.to(tl.int64)
    # The compiler learns what divides the result of an operation, but not that of a call.
    key_row = block_id * key_block_stride + offset * KEY_OFFSET_STRIDE + key_head
    key_row = tl.multiple_of(key_row, KEY_ALIGN)
    scores, k, k_odd = score(q, q_odd, q_tail, q_tail_odd, key_ptr, key_row, known, key_run_stride, A)
    if A.value.TOKEN_SCALES:
        scale_at = at(block_id, offset, kv_head, key_scale_block_stride, key_scale_offset_stride, key_scale_head_stride)
        scores *= tl.load(key_scale_ptr + scale_at, mask=known, other=0.0)[None, :]
    scores = scaled(scores, row_factor[:, None], softcap, A.value.SOFTCAP)
    seen = seen_by_rows(key, known, position, window, EDGE, A.value.WINDOW)
    scores = tl.where(seen, scores, float("-inf"))
    if A.value.SHARED:
        v, v_odd = k, k_odd
    else:
        if A.value.SAME_STRIDES:
            value_row = key_row
        else:
            value_row = block_id * value_block_stride + offset * VALUE_OFFSET_STRIDE + value_head
            value_row = tl.multiple_of(value_row, VALUE_ALIGN)
        v, v_odd = load_values(value_ptr, value_row, known, value_run_stride, A)
    value_scales = None
    if A.value.TOKEN_SCALES:
        scale_at = at(
            block_id, offset, kv_head, value_scale_block_stride, value_scale_offset_stride, value_scale_head_stride
        )
        value_scales = tl.load(value_scale_ptr + scale_at, mask=known, other=0.0)
    if A.value.SCALE_VALUES:  # a weight's product with a small scale would lose bits
        v = (v.to(tl.float32) * value_scales[:, None]).to(A.value.COMPUTE)
        if A.value.VALUE_PAIRS:
            v_odd = (v_odd.to(tl.float32) * value_scales[:, None]).to(A.value.COMPUTE)
    return accumulate(largest, total, values, values_odd, scores, v, v_odd, value_scales, seen, EDGE, A)


@triton.jit
def length_of(seq, seq_len_ptr, plan_ptr, plan_stride, capacity, error_ptr, A: tl.constexpr):
    """Return the keys of a sequence, or the end of a group's; those that no table has room for are reported, and do not
    count."""
    if A.value.IS_SHARED:
        seq_len_ptr = plan_ptr + KEY_END * plan_stride
    asked = tl.load(seq_len_ptr + seq).to(tl.int64)
    report((tl.arange(0, 2) == 0) & (asked > capacity), error_ptr, A.value.BIT)
    return tl.minimum(asked, capacity).to(tl.int32)


@triton.jit
def start(sink_ptr, head, valid, split, A: tl.constexpr):
    """Return maximum, sum and weighted values before any key, but for the sink: a key that all see, of value 0."""
    TILE_ROWS: tl.constexpr = A.value.TILE_ROWS
    VALUE_TILE: tl.constexpr = A.value.VALUE_TILE
    largest = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([TILE_ROWS], tl.float32)
    if sink_ptr is not None:  # noqa: SIM102 -- a compiler takes the branches of `and` both
        if split == 0:
            largest = tl.load(sink_ptr + head, mask=valid, other=0.0) * 1.4426950408889634
            total += 1.0
    if A.value.VALUE_PAIRS:
        values = tl.zeros([TILE_ROWS, VALUE_TILE // 2], tl.float32)
        return largest, total, values, values
    else:
        return largest, total, tl.zeros([TILE_ROWS, VALUE_TILE], tl.float32), 0.0


# Arguments that change from call to call are not specialised on: each value would compile anew, amid serving.
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
def paged_attention_kernel(
    query_ptr, out_ptr,  # [num_tokens, num_kv_heads * GROUP, KEY_SIZE], and VALUE_SIZE
    key_ptr, value_ptr,  # [num_blocks, BLOCK_SIZE, num_kv_heads, runs of KEY_RUN elements]
    key_scale_ptr, value_scale_ptr,  # fp32 [num_blocks, BLOCK_SIZE, num_kv_heads], strides of 0 for fewer; or None
    sink_ptr,  # fp32 [num_kv_heads * GROUP] or None
    table_ptr,  # int32 [num_seqs, capacity / BLOCK_SIZE]
    seq_len_ptr, query_len_ptr,  # [num_seqs]; the latter None for one each
    position_ptr,  # int64 [num_tokens]: of each query in its sequence, ascending; or None for the last ones
    partial_ptr,  # fp32 [num_items * TILE_TOKENS, num_kv_heads * GROUP, VALUE_SIZE] or None for one split each
    sum_ptr,  # fp32 [num_items * TILE_TOKENS, num_kv_heads * GROUP, 2]: maximum and sum
    error_ptr, plan_ptr,  # int32 [1]; int64 [9, num_tokens], see PlanRow, or None where KEYS are "all"
    factor, softcap, window,  # the former two: see scaled()
    num_items, num_pieces, num_kv_heads, num_seqs, num_tokens, num_blocks,  # num_seqs: or groups
    capacity,  # keys that a row of the table has room for
    query_token_stride, query_head_stride,  # all strides in elements
    out_token_stride, out_head_stride, table_stride, plan_stride,
    key_block_stride, key_head_stride, key_run_stride,  # strides of a block's tokens are constants
    value_block_stride, value_head_stride, value_run_stride,
    key_scale_block_stride, key_scale_offset_stride, key_scale_head_stride,
    value_scale_block_stride, value_scale_offset_stride, value_scale_head_stride,
    A: tl.constexpr,  # AttentionConstants
):  # fmt: skip
    TOKEN_SCALES: tl.constexpr = A.value.TOKEN_SCALES
    QUERY_ALIGN: tl.constexpr = A.value.QUERY_ALIGN
    NUM_PHASES: tl.constexpr = A.value.NUM_PHASES
    MOST_WHOLE: tl.constexpr = A.value.MOST_WHOLE
    SPLIT: tl.constexpr = partial_ptr is not None
    head_tile, kv_head, item = program_of(num_items, num_kv_heads, A)
    seq, num_queries, first_row, first_query, split, num_splits = item_of(
        item, seq_len_ptr, query_len_ptr, plan_ptr, plan_stride, num_seqs, capacity, window, num_pieces, SPLIT, A
    )
    if seq >= num_seqs:
        return
    length = length_of(seq, seq_len_ptr, plan_ptr, plan_stride, capacity, error_ptr, A)
    query, token, head, valid, table_row, position, first, last, first_key, limit = rows_of_tile(
        seq, seq_len_ptr, table_ptr, table_stride, position_ptr, plan_ptr, plan_stride, first_row, first_query,
        num_queries, num_tokens, length, capacity, head_tile, kv_head, A,
    )  # fmt: skip
    query_row = token.to(tl.int64) * query_token_stride + head.to(tl.int64) * query_head_stride
    query_row = tl.multiple_of(query_row, QUERY_ALIGN)
    q, q_odd, q_tail, q_tail_odd, row_factor = load_queries(query_ptr, query_row, valid, factor, A)
    if key_scale_ptr is not None and not TOKEN_SCALES:
        row_factor *= tl.load(key_scale_ptr + kv_head * key_scale_head_stride)
    largest, total, values, values_odd = start(sink_ptr, head, valid, split, A)
    low, begin, full_begin, full_end, end = keys_of_split(first, last, first_key, limit, window, split, num_splits, A)
    key_head, value_head = kv_head.to(tl.int64) * key_head_stride, kv_head.to(tl.int64) * value_head_stride
    for phase in tl.static_range(NUM_PHASES):  # full tiles, then those at the edges
        if phase == 1:
            jump = full_end - full_begin
            first_step, end_step = begin, end - jump
        else:
            jump, first_step, end_step = 0, full_begin, full_end
        e0, e1, e2, e3 = entries_of_tile(tile_of_step(first_step, full_begin, jump), low, limit, table_row, A)
        for step in range(first_step, end_step):
            key_tile = tile_of_step(step, full_begin, jump)
            largest, total, values, values_odd = attend(
                largest, total, values, values_odd, q, q_odd, q_tail, q_tail_odd, row_factor, position, window, softcap,
                key_tile, e0, e1, e2, e3, low, limit, num_blocks, kv_head,
                key_ptr, key_head, key_block_stride, key_run_stride,
                value_ptr, value_head, value_block_stride, value_run_stride,
                key_scale_ptr, key_scale_block_stride, key_scale_offset_stride, key_scale_head_stride,
                value_scale_ptr, value_scale_block_stride, value_scale_offset_stride, value_scale_head_stride,
                phase == 1, A,
            )  # fmt: skip
            tile_after = tile_of_step(step + 1, full_begin, jump)
            e0, e1, e2, e3 = entries_of_tile(tile_after, low, tl.where(step + 1 < end_step, limit, -1), table_row, A)

    values = whole(values, values_odd, A.value.VALUE_PAIRS)
    if value_scale_ptr is not None and not TOKEN_SCALES:
        values *= tl.load(value_scale_ptr + kv_head * value_scale_head_stride)
    if SPLIT:  # some compilers take the branches of `and` both
        if num_splits > MOST_WHOLE:
            row = query - first_query
            store_partial(partial_ptr, sum_ptr, item, row, head, num_kv_heads, largest, total, values, valid, A)
        else:
            store_out(out_ptr, token, head, out_token_stride, out_head_stride, total, values, valid, A)
    else:
        store_out(out_ptr, token, head, out_token_stride, out_head_stride, total, values, valid, A)
    if (kv_head == 0) & (head_tile == 0):
        report_unknown(table_row, low, begin, end, limit, num_blocks, error_ptr, A)

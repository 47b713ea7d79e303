"""Queries and keys that a program of the attention kernel takes.

    program ─► KV head, item ─► sequence, tile of queries, split of its keys ─► rows, positions ─► tiles of keys

Items are numbered over all sequences, one after the other: a sequence has its tiles of queries times its splits.

    lengths           9000   200   200           one query each, three pieces wished for
    splits               3     1     1           a piece is a third of all keys, or more
    items            0 1 2     3     4           the grid has num_tiles + num_pieces: at least as many

The lengths stay on the device. Each program finds its item by adding up.

Of keys that sequences share, a group of sequences stands for a sequence (see kvpage.kernels.attention_shared): its
queries are those of its members, and its keys those from `begin` to `end` of the first member's table. A sequence's own
keys begin after those of its groups.
"""

import triton
import triton.language as tl

from kvpage.layout.shared_prefixes import PlanRow

OWN_BEGIN, OUTER_GROUP, INNER_GROUP, RANK, ORDER, GROUP_FIRST, GROUP_COUNT, KEY_BEGIN, KEY_END = (
    tl.constexpr(int(row)) for row in PlanRow
)


@triton.jit
def program_of(num_items, num_kv_heads, A: tl.constexpr):
    """Return (tile of heads of a group, KV head, item) of this program."""
    GROUP: tl.constexpr = A.value.GROUP
    HEADS: tl.constexpr = A.value.HEADS
    HEAD_TILES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    program = tl.program_id(0)
    head_tile = program % HEAD_TILES
    kv_head = (program // HEAD_TILES) % num_kv_heads
    item = num_items - 1 - program // HEAD_TILES // num_kv_heads  # a prompt's last, its longest, first
    return head_tile, kv_head, item


@triton.jit
def queries_of(index, query_len_ptr, num_seqs):
    """Return the queries of the sequences of this index: 0 for one that is not there."""
    if query_len_ptr is None:
        return (index < num_seqs).to(tl.int32)
    else:
        return tl.maximum(tl.load(query_len_ptr + index, mask=index < num_seqs, other=0).to(tl.int32), 0)


@triton.jit
def query_tiles(queries, A: tl.constexpr):
    """Return the tiles that hold `queries` queries of a sequence."""
    TILE_TOKENS: tl.constexpr = A.value.TILE_TOKENS
    return (queries + TILE_TOKENS - 1) // TILE_TOKENS


@triton.jit
def span_of(index, seq_len_ptr, begin_ptr, num_seqs, capacity, window, A: tl.constexpr):
    """Return a bound of the tiles of keys that one tile of queries reads, for the sequences of this index.

    begin_ptr: of each sequence the first key, of a tile's beginning; None for 0.
    """
    TILE_KEYS: tl.constexpr = A.value.TILE_KEYS
    TILE_TOKENS: tl.constexpr = A.value.TILE_TOKENS
    length = tl.load(seq_len_ptr + index, mask=index < num_seqs, other=0).to(tl.int64)
    length = tl.maximum(tl.minimum(length, capacity), 0)
    span = ((length + TILE_KEYS - 1) // TILE_KEYS).to(tl.int32)
    if begin_ptr is not None:
        begin = tl.load(begin_ptr + index, mask=index < num_seqs, other=0)
        span = tl.maximum(span - (begin // TILE_KEYS).to(tl.int32), 0)
    if A.value.BOUNDED:
        span = tl.minimum(span, window // TILE_KEYS + TILE_TOKENS // TILE_KEYS + 3)
    return span


@triton.jit
def splits_of(span, piece, A: tl.constexpr):
    """Return the splits of sequences with `span` tiles of keys, none of more than `piece` where MAX_SPLITS allows."""
    return tl.minimum(tl.maximum((span + piece - 1) // piece, 1), A.value.MAX_SPLITS)


@triton.jit
def piece_of(seq_len_ptr, query_len_ptr, begin_ptr, num_seqs, capacity, window, num_pieces, A: tl.constexpr):
    """Return the tiles of keys of a split: the keys that all tiles of queries read, over `num_pieces`."""
    SEARCH: tl.constexpr = A.value.SEARCH
    total = num_pieces.to(tl.int64) * 0
    for begin in range(0, num_seqs, SEARCH):
        index = begin + tl.arange(0, SEARCH)
        tiles = query_tiles(queries_of(index, query_len_ptr, num_seqs), A)
        span = span_of(index, seq_len_ptr, begin_ptr, num_seqs, capacity, window, A)
        total += tl.sum(tiles.to(tl.int64) * span, 0)
    piece = tl.minimum((total + num_pieces - 1) // num_pieces, 2**30).to(tl.int32)
    return tl.maximum(piece, A.value.MIN_SPLIT_TILES)


@triton.jit
def find(
    target, seq_len_ptr, query_len_ptr, begin_ptr, num_seqs, capacity, window, num_pieces,
    BY_ROW: tl.constexpr,  # target is a row of the query, not an item
    BY_SEQ: tl.constexpr,  # target is a sequence
    SPLIT: tl.constexpr,  # num_pieces are wished for; else each sequence has one split
    A: tl.constexpr,
):  # fmt: skip
    """Return (sequence, its queries, its first row, its first item, its splits); num_seqs for a target too large."""
    SEARCH: tl.constexpr = A.value.SEARCH
    seq, first_row, first_item, passed_targets = target * 0, target * 0, target * 0, target * 0
    piece = target * 0 + 1
    if SPLIT:
        if A.value.IS_FIXED:
            SPLIT_TILES: tl.constexpr = A.value.SPLIT_TILES
            piece = tl.where(num_pieces > 0, target * 0 + SPLIT_TILES, 2**30)
        else:
            piece = piece_of(seq_len_ptr, query_len_ptr, begin_ptr, num_seqs, capacity, window, num_pieces, A)
    for begin in range(0, num_seqs, SEARCH):
        index = begin + tl.arange(0, SEARCH)
        queries = queries_of(index, query_len_ptr, num_seqs)
        items = query_tiles(queries, A)
        if SPLIT:
            items = items * splits_of(span_of(index, seq_len_ptr, begin_ptr, num_seqs, capacity, window, A), piece, A)
        targets = queries if BY_ROW else items
        if BY_SEQ:
            targets = (index < num_seqs).to(tl.int32)
        passed = (index < num_seqs) & (passed_targets + tl.cumsum(targets, 0) <= target)
        seq += tl.sum(passed.to(tl.int32), 0)
        first_row += tl.sum(tl.where(passed, queries, 0), 0)
        first_item += tl.sum(tl.where(passed, items, 0), 0)
        passed_targets += tl.sum(targets, 0)
    num_splits = target * 0 + 1
    if SPLIT:
        num_splits = splits_of(span_of(seq, seq_len_ptr, begin_ptr, num_seqs, capacity, window, A), piece, A)
    return seq, queries_of(seq, query_len_ptr, num_seqs), first_row, first_item, num_splits


@triton.jit
def item_of(
    item, seq_len_ptr, query_len_ptr, plan_ptr, plan_stride, num_seqs, capacity, window, num_pieces,
    SPLIT: tl.constexpr, A: tl.constexpr,
):  # fmt: skip
    """Return (sequence, its queries, its first row, the tile's first query, split, splits); num_seqs for no item.

    Of shared keys a sequence is a group, and its first row a place in ORDER.
    """
    TILE_TOKENS: tl.constexpr = A.value.TILE_TOKENS
    begin_ptr = None
    if A.value.IS_OWN:
        begin_ptr = plan_ptr + OWN_BEGIN * plan_stride
    if A.value.IS_SHARED:
        seq_len_ptr, begin_ptr = plan_ptr + KEY_END * plan_stride, plan_ptr + KEY_BEGIN * plan_stride
        query_len_ptr = plan_ptr + GROUP_COUNT * plan_stride
    seq, num_queries, first_row, first_query, split, num_splits = item, item * 0 + 1, item, item * 0, item * 0, 1
    if SPLIT or query_len_ptr is not None:
        seq, num_queries, first_row, first_item, num_splits = find(
            item, seq_len_ptr, query_len_ptr, begin_ptr, num_seqs, capacity, window, num_pieces, False, False, SPLIT, A
        )
        first_query = (item - first_item) // num_splits * TILE_TOKENS
        split = (item - first_item) % num_splits
    if A.value.IS_SHARED:
        first_row = tl.load(plan_ptr + GROUP_FIRST * plan_stride + seq, mask=seq < num_seqs, other=0).to(tl.int32)
    return seq, num_queries, first_row, first_query, split, num_splits


@triton.jit
def queries_of_tile(first_row, first_query, num_queries, num_tokens, head_tile, kv_head, A: tl.constexpr):
    """Return [TILE_ROWS] each row's query in the sequence, its token among all, its head, and whether there is one.

    HEADS heads of a token come one after the other.
    """
    GROUP: tl.constexpr = A.value.GROUP
    HEADS: tl.constexpr = A.value.HEADS
    TILE_ROWS: tl.constexpr = A.value.TILE_ROWS
    TILE_TOKENS: tl.constexpr = A.value.TILE_TOKENS
    row = tl.arange(0, TILE_ROWS)
    query = first_query + row // HEADS
    head = head_tile * HEADS + row % HEADS  # of the group
    token = first_row + query
    valid = (row < TILE_TOKENS * HEADS) & (head < GROUP) & (query < num_queries) & (token < num_tokens)
    return query, token, head + kv_head * GROUP, valid


@triton.jit
def positions_of_rows(
    position_ptr, first_row, first_query, num_queries, num_tokens, length, query, token, valid, A: tl.constexpr
):
    """Return the positions of the tile's first query, of its last, and of each row.

    The queries are the sequence's last ones, unless positions are given.
    """
    TILE_TOKENS: tl.constexpr = A.value.TILE_TOKENS
    first = length - num_queries + first_query
    last = first + tl.minimum(TILE_TOKENS, num_queries - first_query) - 1
    position = length - num_queries + query
    if position_ptr is not None:
        first, last = given_positions(
            position_ptr, first_row, first_query, num_queries, num_tokens, length, TILE_TOKENS
        )
        position = tl.load(position_ptr + token, mask=valid, other=0)
        position = tl.minimum(position, length - 1).to(tl.int32)
    return first, last, position


@triton.jit
def given_positions(position_ptr, first_row, first_query, num_queries, num_tokens, length, TILE_TOKENS: tl.constexpr):
    """Return the positions of the tile's first and last query: at most the sequence's last token."""
    first = first_row + first_query
    last = first_row + tl.minimum(first_query + TILE_TOKENS, num_queries) - 1
    first = tl.load(position_ptr + first, mask=first < num_tokens, other=0)
    last = tl.load(position_ptr + last, mask=last < num_tokens, other=0)
    return tl.minimum(first, length - 1).to(tl.int32), tl.minimum(last, length - 1).to(tl.int32)


@triton.jit
def members_of_tile(order_ptr, seq_len_ptr, place, valid, capacity, num_tokens):
    """Return what positions_of_rows does, of rows of a group: each is the last token of its sequence.

    place: of each row in the order. Returns its token, and whether there is one, before the positions.
    """
    token = tl.load(order_ptr + place, mask=valid, other=-1).to(tl.int32)
    valid = valid & (token >= 0) & (token < num_tokens)
    position = tl.minimum(tl.load(seq_len_ptr + token, mask=valid, other=0).to(tl.int64), capacity).to(tl.int32) - 1
    first, last = num_tokens * 0 + 2**30, num_tokens * 0 - 1
    for _ in range(0, tl.minimum(num_tokens, 1)):  # once: a compiler takes no load into its pipeline whose mask follows
        first = tl.minimum(first, tl.min(tl.where(valid, position, 2**30), 0))  # from a reduction outside of a loop
        last = tl.maximum(last, tl.max(tl.where(valid, position, -1), 0))
    return token, valid, first, last, position


@triton.jit
def rows_of_tile(
    seq, seq_len_ptr, table_ptr, table_stride, position_ptr, plan_ptr, plan_stride, first_row, first_query,
    num_queries, num_tokens, length, capacity, head_tile, kv_head, A: tl.constexpr,
):  # fmt: skip
    """Return each row's query, token, head and whether there is one; the row of the tables that is read; each row's
    position; the least and the largest position; the first and the last key that may be read."""
    query, token, head, valid = queries_of_tile(first_row, first_query, num_queries, num_tokens, head_tile, kv_head, A)
    table, first_key = seq, 0
    if A.value.IS_OWN:
        first_key = tl.load(plan_ptr + OWN_BEGIN * plan_stride + seq).to(tl.int32)
    if A.value.IS_SHARED:
        order_ptr = plan_ptr + ORDER * plan_stride
        table = tl.load(order_ptr + first_row).to(tl.int32)
        first_key = tl.load(plan_ptr + KEY_BEGIN * plan_stride + seq).to(tl.int32)
        token, valid, first, last, position = members_of_tile(
            order_ptr, seq_len_ptr, token, valid, capacity, num_tokens
        )
        last_key = length - 1
    else:
        first, last, position = positions_of_rows(
            position_ptr, first_row, first_query, num_queries, num_tokens, length, query, token, valid, A
        )
        last_key = last
    table_row = table_ptr + table.to(tl.int64) * table_stride
    return query, token, head, valid, table_row, position, first, last, first_key, last_key


@triton.jit
def keys_of_split(first, last, start, last_key, window, split, num_splits, A: tl.constexpr):
    """Return (first key that any row sees, begin, full_begin, full_end, end), the latter four in tiles.

    [begin, end) are this split's, of the keys from `start`, where a tile begins, to `last_key`. Every row sees all keys
    of [full_begin, full_end).
    """
    TILE_KEYS: tl.constexpr = A.value.TILE_KEYS
    MIN_SPLIT_TILES: tl.constexpr = A.value.MIN_SPLIT_TILES
    low = start
    full_low = start
    if A.value.WINDOW:
        low = tl.maximum(first - window + 1, start)
        full_low = tl.maximum(last - window + 1, start)
    low_tile = low // TILE_KEYS
    high_tile = (tl.maximum(last_key + 1, 0) + TILE_KEYS - 1) // TILE_KEYS
    tiles = tl.maximum(high_tile - low_tile, 0)
    tiles_of_split = tl.maximum((tiles + num_splits - 1) // num_splits, MIN_SPLIT_TILES)
    begin = tl.minimum(low_tile + split * tiles_of_split, high_tile)
    end = tl.minimum(begin + tiles_of_split, high_tile)
    if A.value.HAS_EDGES:
        full_begin = tl.minimum(tl.maximum((full_low + TILE_KEYS - 1) // TILE_KEYS, begin), end)
        full_end = tl.maximum(tl.minimum(tl.maximum(first + 1, 0) // TILE_KEYS, end), full_begin)
    else:  # all rows see all keys that are read
        full_begin, full_end = begin, end
    return low, begin, full_begin, full_end, end

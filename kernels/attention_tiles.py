"""Queries and keys that a program of the attention kernel takes.

    program ─► KV head, split, tile of queries ─► sequence, rows, positions ─► tiles of keys, those that all rows see

Tiles of queries are numbered over all sequences, one after the other; the lengths stay on the device.
"""

import triton
import triton.language as tl


@triton.jit
def program_of(num_tiles, num_splits, num_kv_heads, A: tl.constexpr):
    """Return (tile of heads of a group, KV head, split of the keys, tile of queries) of this program."""
    GROUP: tl.constexpr = A.value.GROUP
    HEADS: tl.constexpr = A.value.HEADS
    HEAD_TILES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    program = tl.program_id(0)
    head_tile = program % HEAD_TILES
    kv_head = (program // HEAD_TILES) % num_kv_heads
    split = (program // HEAD_TILES // num_kv_heads) % num_splits
    tile = num_tiles - 1 - program // HEAD_TILES // num_kv_heads // num_splits  # a prompt's last, its longest, first
    return head_tile, kv_head, split, tile


@triton.jit
def sequence_of(tile, query_len_ptr, num_seqs, A: tl.constexpr):
    """Return (sequence, its queries, row of the first, index of the tile's first); num_seqs for a tile too many."""
    if query_len_ptr is None:
        seq, num_queries, first_row, first_query = tile, tile * 0 + 1, tile, tile * 0
    else:
        seq, num_queries, first_row, first_query = find_sequence(tile, query_len_ptr, num_seqs, A)
    return seq, num_queries, first_row, first_query


@triton.jit
def find_sequence(tile, query_len_ptr, num_seqs, A: tl.constexpr):
    """Do sequence_of where the sequences' queries differ in number."""
    TILE_TOKENS: tl.constexpr = A.value.TILE_TOKENS
    SEARCH: tl.constexpr = A.value.SEARCH
    seq = tile * 0
    first_row = tile * 0
    tiles_before = tile * 0  # of the sequences that end before this tile
    tiles_so_far = tile * 0
    for begin in range(0, num_seqs, SEARCH):
        index = begin + tl.arange(0, SEARCH)
        queries = tl.maximum(tl.load(query_len_ptr + index, mask=index < num_seqs, other=0).to(tl.int32), 0)
        tiles = (queries + TILE_TOKENS - 1) // TILE_TOKENS
        passed = (index < num_seqs) & (tiles_so_far + tl.cumsum(tiles, 0) <= tile)
        seq += tl.sum(passed.to(tl.int32), 0)
        first_row += tl.sum(tl.where(passed, queries, 0), 0)
        tiles_before += tl.sum(tl.where(passed, tiles, 0), 0)
        tiles_so_far += tl.sum(tiles, 0)
    queries = tl.load(query_len_ptr + seq, mask=seq < num_seqs, other=0).to(tl.int32)
    return seq, queries, first_row, (tile - tiles_before) * TILE_TOKENS


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
    """Return those of the tile's first query and of its last: at most the sequence's last token."""
    first = first_row + first_query
    last = first_row + tl.minimum(first_query + TILE_TOKENS, num_queries) - 1
    first = tl.load(position_ptr + first, mask=first < num_tokens, other=0)
    last = tl.load(position_ptr + last, mask=last < num_tokens, other=0)
    return tl.minimum(first, length - 1).to(tl.int32), tl.minimum(last, length - 1).to(tl.int32)


@triton.jit
def keys_of_split(first, last, window, split, num_splits, A: tl.constexpr):
    """Return (first key that any row sees, begin, full_begin, full_end, end), the latter four in tiles.

    [begin, end) are this split's. Every row sees all keys of [full_begin, full_end).
    """
    TILE_KEYS: tl.constexpr = A.value.TILE_KEYS
    MIN_SPLIT_TILES: tl.constexpr = A.value.MIN_SPLIT_TILES
    low = 0
    full_low = 0
    if A.value.WINDOW:
        low = tl.maximum(first - window + 1, 0)
        full_low = tl.maximum(last - window + 1, 0)
    low_tile = low // TILE_KEYS
    high_tile = (tl.maximum(last + 1, 0) + TILE_KEYS - 1) // TILE_KEYS
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

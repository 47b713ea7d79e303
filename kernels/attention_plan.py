"""The cut of attention into thread blocks: sizes of tiles, and splits of the keys. Plain integers, no tensors.

rows of a tile     TILE_TOKENS tokens of HEADS query heads of one KV head: token * HEADS + head of the group
                   a group of more heads than rows takes HEAD_TILES tiles, each of one token
keys of a tile     TILE_KEYS at a time, of those that any of its rows sees
splits             few tiles over many keys would leave multiprocessors without work: the keys are split over NUM_SPLITS
                   thread blocks, whose partial sums a second kernel merges
"""

from typing import NamedTuple

MIN_ROWS = 16  # of a tensor core's product
MAX_SPLITS = 128
FEW_BYTES = 20_000  # of a tile of keys: more than one has to be under way to keep memory busy


class Sizes(NamedTuple):
    """The sizes of a call. stored_bytes and compute_bytes: of an element in the cache, and in the products."""

    group_size: int
    key_size: int
    value_size: int
    stored_bytes: int
    compute_bytes: int
    shares_rows: bool  # V is the first part of K
    has_token_scales: bool


class Tile(NamedTuple):
    """Compile-time constants of a launch. KEY_TILE + KEY_TAIL columns hold a key, VALUE_TILE a value."""

    rows: int
    keys: int
    key_tile: int
    key_tail: int
    value_tile: int
    num_warps: int
    num_stages: int
    precision: str  # of products in fp32

    def num_tokens(self, group_size: int, max_query_len: int) -> int:
        """Return the tokens of a tile: one, where no sequence has more. All its rows then see all keys."""
        return 1 if max_query_len == 1 else max(self.rows // group_size, 1)


def next_power_of_2(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


def split_columns(size: int) -> tuple[int, int]:
    """Return (tile, tail): powers of two that hold `size` columns, two where that needs less padding than one."""
    whole = max(next_power_of_2(size), MIN_ROWS)
    half, tail = whole // 2, max(next_power_of_2(size - whole // 2), MIN_ROWS)
    return (half, tail) if half >= MIN_ROWS and half + tail < whole else (whole, 0)


def choose_tile(sizes: Sizes, rows_wanted: int, capability: int) -> Tile:
    """Choose the tile for about `rows_wanted` rows a sequence and KV head (its queries times its group).

    capability: the device's, 10 * major + minor.
    """
    key_tile, key_tail = split_columns(sizes.key_size)
    shares = sizes.shares_rows and sizes.value_size <= key_tile
    value_tile = key_tile if shares else max(next_power_of_2(sizes.value_size), MIN_ROWS)
    widest = max(key_tile + key_tail, value_tile)
    rows = min(max(next_power_of_2(rows_wanted), MIN_ROWS), _most_rows(widest, sizes, capability))
    row_bytes = (key_tile + key_tail + (0 if shares else value_tile)) * sizes.compute_bytes
    bytes_wanted = 2**14 if sizes.compute_bytes == 4 and rows > MIN_ROWS else 2**15
    keys = min(max(bytes_wanted // next_power_of_2(row_bytes), MIN_ROWS), 128 if rows == MIN_ROWS else 64)
    num_warps = 8 if rows >= 64 or rows * value_tile >= 2**13 else 4
    stored_tile = keys * row_bytes // sizes.compute_bytes * sizes.stored_bytes
    num_stages = 2 if rows * widest >= 2**14 else 5 if rows == MIN_ROWS and stored_tile < FEW_BYTES else 3
    return Tile(rows, keys, key_tile, key_tail, value_tile, num_warps, num_stages, _precision(widest))


def _most_rows(widest: int, sizes: Sizes, capability: int) -> int:
    """Return as many rows as leave a tile's sums and products in registers.

    tests/kernels/test_attention_compile.py checks this.

    Where the tensor cores read their operands from shared memory (sm_90, sm_100), a tile may have twice as many.
    """
    reads_shared = 90 <= capability < 120
    if sizes.compute_bytes == 4:
        return 32 if widest <= 64 else 16
    if widest <= 256:
        return 128 if reads_shared and widest <= 128 and not sizes.has_token_scales else 64
    return 32 if widest <= 576 and (reads_shared or sizes.stored_bytes > 1) else 16


def _precision(widest: int) -> str:
    """Return "tf32x3" where registers have room: three products of 19 bits, nearly as exact as one in fp32."""
    return "tf32x3" if widest <= 128 else "ieee"


def choose_splits(num_tiles: int, max_seq_len: int, total_keys: int, tile: Tile, num_multiprocessors: int) -> int:
    """Choose the number of thread blocks over which the keys of the longest sequence are split.

    num_tiles: tiles of queries, over all heads. total_keys: keys that these tiles read, or a bound. Decoding is bound
    by memory and merging is cheap, so it takes enough pieces for all thread blocks to end together. Tiles of many rows
    are split only where they are too few for the device.
    """
    pieces = num_multiprocessors * (8 if tile.rows <= 2 * MIN_ROWS else 2)
    if num_tiles == 0 or max_seq_len == 0 or (tile.rows > 2 * MIN_ROWS and num_tiles >= num_multiprocessors):
        return 1
    piece = max(-(-total_keys // pieces), min_keys_of_split(tile))
    return min(max(-(-max_seq_len // piece), 1), MAX_SPLITS)


def min_keys_of_split(tile: Tile) -> int:
    """Return the least keys that are worth a thread block and its part of the merging."""
    return max(2 * tile.keys, 8 * tile.rows)

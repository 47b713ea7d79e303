"""The cut of attention into thread blocks: sizes of tiles, and splits of the keys. Plain integers, no tensors.

A tile's sums lie in registers; its queries, and the tiles of keys under way, in shared memory (see shared_bytes).

rows of a tile     TILE_TOKENS tokens of HEADS query heads of one KV head: token * HEADS + head of the group
                   a group of more heads than rows takes HEAD_TILES tiles, each of one token
keys of a tile     TILE_KEYS at a time, of those that any of its rows sees
pieces             few tiles over many keys would leave multiprocessors idle: all keys are cut into about this many
                   pieces, each sequence's into as many as its length asks for, and a second kernel merges partial sums
"""

from collections.abc import Iterator
from typing import NamedTuple

from kvpage.kernels.prepared import VERSION

MIN_ROWS = 16  # of a tensor core's product
MAX_SPLITS = 128  # of a sequence
MIDDLE_ROWS = 64
FEW_ROWS = 32  # at most, of a tile of which a multiprocessor has room for several
SHARED_KEYS = 32  # of a tile of latents for 64 heads
MIN_KEYS = 16  # of a tensor core's product
NUM_STAGES = 3  # of the loop over keys: a tile is multiplied while the next one is under way, or the next two on sm_90
# The same for latents that are read once, on sm_90. From Triton 3.9 on, the compiler keeps operands' addresses in
# registers: beside the addresses of a second tile under way, sums would not fit.
LATENT_STAGES = 2 if VERSION >= (3, 9) else NUM_STAGES
FIXED_ROWS = 64  # of a tile of fixed splits, for decodes and prompts alike
FIXED_WIDE_ROWS = 32  # the same of values of more than 128 elements: sums are in registers twice
FIXED_KEYS = 512  # of a fixed split
MOST_FIXED_PARTIAL = 2**26  # numbers of partial results of fixed splits; beyond, one program takes all of a tile's
ANY_NUMBER = 2**20  # of fixed splits
BARRIER_BYTES = 512  # of shared memory, at most, for what the compiler adds


class Sizes(NamedTuple):
    """The sizes of a call. stored_bytes and compute_bytes: of an element in the cache, and in the products."""

    group_size: int
    key_size: int
    value_size: int
    stored_bytes: int
    compute_bytes: int
    shares_rows: bool  # V is the first part of K
    has_token_scales: bool
    is_scattered: bool = False  # neighbours of a row of V lie apart: each element has an address
    block_size: int = 16


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


def choose_tile(sizes: Sizes, rows_wanted: int, capability: int, shared_memory: int) -> Tile:
    """Choose the tile for about `rows_wanted` rows a sequence and KV head (its queries times its group).

    capability: the device's, 10 * major + minor. shared_memory: bytes that it allows a thread block.

    Raises:
        ValueError: a row is too wide for shared memory.
    """
    key_tile, key_tail = split_columns(sizes.key_size)
    shares = _shares_tile(sizes, key_tile)
    value_tile = key_tile if shares else max(next_power_of_2(sizes.value_size), MIN_ROWS)
    widest = max(key_tile + key_tail, value_tile)
    reads_once = shares and _fits_all_heads(widest, sizes, capability)
    rows = _rows(rows_wanted, MIDDLE_ROWS if reads_once else _most_rows(widest, sizes, capability))
    row_bytes = (key_tile + key_tail + (0 if shares else value_tile)) * sizes.compute_bytes
    bytes_wanted = 2**14 if sizes.compute_bytes == 4 and rows > MIN_ROWS else 2**15
    if sizes.is_scattered and rows == MIN_ROWS:
        bytes_wanted //= 2
    keys = min(max(bytes_wanted // next_power_of_2(row_bytes), MIN_KEYS), 128 if rows == MIN_ROWS else 64)
    if reads_once:
        keys = SHARED_KEYS
    num_warps = _num_warps(rows, value_tile)
    num_stages = LATENT_STAGES if reads_once and _reads_shared(capability) else NUM_STAGES
    tile = Tile(rows, keys, key_tile, key_tail, value_tile, num_warps, num_stages, _precision(widest))
    for smaller in _no_larger(tile):
        if shared_bytes(smaller, sizes, capability) <= shared_memory:
            return smaller
    raise ValueError(
        f"heads must fit into the device's shared memory, {shared_memory} bytes a thread block, "
        f"got K of {sizes.key_size} and V of {sizes.value_size} elements"
    )


def _no_larger(tile: Tile) -> Iterator[Tile]:
    """Yield the tile, then ever smaller ones: fewer keys, then fewer rows, at last none under way."""
    yield tile
    while tile.keys > MIN_KEYS:
        tile = tile._replace(keys=tile.keys // 2)
        yield tile
    while tile.rows > MIN_ROWS:
        rows = tile.rows // 2
        tile = tile._replace(rows=rows, num_warps=_num_warps(rows, tile.value_tile))
        yield tile
    yield tile._replace(num_stages=2)


def shared_bytes(tile: Tile, sizes: Sizes, capability: int) -> int:
    """Return the shared memory that compilers take for a thread block; tests compare it with what they report.

    queries, and tiles of keys under way, as they are stored; then the weights, or a tile that is widened: these two
    lie in one place, one after the other. In fp32, queries and weights are laid out once more for V's product.
    """
    columns = tile.key_tile + tile.key_tail
    value_columns = 0 if _shares_tile(sizes, tile.key_tile) else tile.value_tile
    key_bytes = (columns + value_columns) * sizes.stored_bytes + (8 if sizes.has_token_scales else 0)
    num_tiles = tile.num_stages - (0 if tile.rows >= MIDDLE_ROWS and _reads_shared(capability) else 1)
    queries, weights = (tile.rows * number * sizes.compute_bytes for number in (columns, tile.keys))
    widened = tile.keys * max(columns, value_columns) * sizes.compute_bytes
    if sizes.stored_bytes == sizes.compute_bytes:
        widened = 0
    if sizes.compute_bytes == 4 and value_columns:
        weights += queries + weights
    return queries + num_tiles * tile.keys * key_bytes + max(weights, widened) + BARRIER_BYTES


def _shares_tile(sizes: Sizes, key_tile: int) -> bool:
    """Return whether V is in the tile of K's first columns."""
    return sizes.shares_rows and sizes.value_size <= key_tile


def _reads_shared(capability: int) -> bool:
    """Return whether tensor cores read the operands of 64 rows from shared memory: on sm_90 and sm_100."""
    return 90 <= capability < 120


def _num_warps(rows: int, value_tile: int) -> int:
    return 8 if rows >= 64 or rows * value_tile >= 2**13 else 4


def _rows(num_rows: int, most: int) -> int:
    """Return the rows of a tile: of few sizes, since a kernel is compiled for each."""
    return next(rows for rows in (MIN_ROWS, min(MIDDLE_ROWS, most), most) if rows >= min(num_rows, most))


def _most_rows(widest: int, sizes: Sizes, capability: int) -> int:
    """Return as many rows as leave a tile's sums and products in registers.

    tests/kernels/test_attention_compile.py checks this.

    Where the tensor cores read their operands from shared memory (sm_90, sm_100), a tile may have twice as many.
    """
    reads_shared = _reads_shared(capability)
    if sizes.compute_bytes == 4:
        return FEW_ROWS if widest <= 64 else MIN_ROWS
    if widest <= 256:
        return 128 if reads_shared and widest <= 128 and not sizes.has_token_scales else 64
    return FEW_ROWS if widest <= 576 and (reads_shared or sizes.stored_bytes > 1) else MIN_ROWS


def _fits_all_heads(widest: int, sizes: Sizes, capability: int) -> bool:
    """Return whether 64 heads of a token fit, so that their latents are read once.

    Their queries and three tiles of 32 keys take 180 KiB of shared memory, and their sums 128 KiB of registers. 128
    heads would take all 256 KiB of registers for sums: their two thread blocks are neighbours, and the second one finds
    the latents in the L2 cache. All rows of a tile are of one token, so none of its keys is masked out for some rows.
    A tile lies in two blocks at most: addresses in more take registers that there are not.
    """
    has_room = capability in (80, 87, 90)
    is_plain = sizes.stored_bytes == sizes.compute_bytes == 2 and sizes.block_size % 16 == 0
    return has_room and is_plain and 256 < widest <= 576 and sizes.group_size > FEW_ROWS


def _precision(widest: int) -> str:
    """Return "tf32x3" where registers have room: three products of 19 bits, nearly as exact as one in fp32."""
    return "tf32x3" if widest <= 128 else "ieee"


def choose_pieces(
    num_tiles: int, head_tiles: int, max_seq_len: int, tile: Tile, is_decode: bool, num_multiprocessors: int
) -> int:
    """Choose the number of pieces into which the keys of all sequences are cut, each by head_tiles thread blocks.

    num_tiles: tiles of queries. max_seq_len: a bound. is_decode: each sequence has one query. Decoding is bound by
    memory and merging is cheap, so it takes enough pieces for all thread blocks to end together, however unlike the
    sequences are. Tiles of many rows have larger partial results, and fewer pieces. Those of prefills are split only
    where they are too few for the device. Returns 0 where no sequence is split.
    """
    is_wide = tile.rows > FEW_ROWS
    if num_tiles == 0 or max_seq_len <= min_keys_of_split(tile):
        return 0
    if is_wide and not is_decode and num_tiles * head_tiles >= num_multiprocessors:
        return 0
    return max(num_multiprocessors * (2 if is_wide else 8) // head_tiles, 1)


def choose_fixed_tile(sizes: Sizes, capability: int, shared_memory: int) -> Tile:
    """Choose the tile for fixed splits by sizes and the device, never by the number of queries. Raises as above."""
    wanted = FIXED_ROWS if sizes.value_size <= 128 else FIXED_WIDE_ROWS
    return choose_tile(sizes, wanted, capability, shared_memory)


def split_tiles(tile: Tile) -> int:
    """Return the tiles of keys of a fixed split."""
    return max(FIXED_KEYS // tile.keys, 1)


def choose_fixed_splits(
    num_tiles: int, head_tiles: int, max_seq_len: int, tile: Tile, num_rows: int, num_multiprocessors: int
) -> int:
    """Choose how many programs share a tile of queries, each with one fixed split; 1 for one with all of them.

    It may depend on anything: the bits do not depend on it. num_rows: of a split's partial results.
    """
    most = -(-max_seq_len // (split_tiles(tile) * tile.keys))
    is_idle = num_tiles * head_tiles < 2 * num_multiprocessors
    return most if is_idle and most * num_rows * (tile.value_tile + 2) <= MOST_FIXED_PARTIAL else 1


def choose_items(num_tiles: int, num_pieces: int, max_seq_len: int, tile: Tile) -> int:
    """Return a bound of the splits of all tiles of queries.

    A split of a tile has a piece's keys, but for the tile's last one: all have at most num_tiles + num_pieces.
    """
    if num_pieces == 0:
        return num_tiles
    most = min(max(-(-max_seq_len // min_keys_of_split(tile)), 1), MAX_SPLITS)  # of one tile
    return min(num_tiles + num_pieces, num_tiles * most)


def min_keys_of_split(tile: Tile) -> int:
    """Return the least keys that are worth a thread block and its part of the merging."""
    return max(2 * tile.keys, 8 * tile.rows)

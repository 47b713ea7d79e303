"""Tiles of rows, moved between plain rows and a cache: the code that the kernels share.

a row   the SIZE elements of one head of one token, side by side in memory
a tile  TILE_ROWS rows. Where the cache keeps a row in one run, they are numbered token * num_heads + head, mostly their
        order in memory. Where it keeps a row in many runs (the backend "paged"), they are of one head, one token after
        the other, since there the tokens of a block are side by side.

Offsets count elements, in int64. Pointers are to integers: rows that move without conversion keep every bit of a NaN.
"""

import triton
import triton.language as tl

from kvpage.kernels.quantize import decode_fp8, encode_fp8, encode_int8, from_fp32, to_fp32

ROWS_FIRST = tl.constexpr(tuple(map(int, triton.__version__.split(".")[:2])) <= (3, 6))


@triton.jit
def at(block_id, offset, head, block_stride, offset_stride, head_stride):
    """Return [rows] offsets of a cache's entries for each token and head."""
    return block_id * block_stride + offset * offset_stride + head * head_stride


@triton.jit
def rows_of_tile(tile, num_tokens, NUM_HEADS: tl.constexpr, TILE_ROWS: tl.constexpr, IN_RUNS: tl.constexpr):
    """Return token and head of each row of a tile, int64, and whether there is such a token."""
    none = tl.zeros([TILE_ROWS], tl.int64)
    if IN_RUNS:
        token = (none + tile // NUM_HEADS) * TILE_ROWS + tl.arange(0, TILE_ROWS)
        head = none + tile % NUM_HEADS
    else:
        row = (none + tile) * TILE_ROWS + tl.arange(0, TILE_ROWS)
        token = row // NUM_HEADS
        head = row % NUM_HEADS
    return token, head, token < num_tokens


@triton.jit
def load_rows(ptr, row, wanted, SIZE: tl.constexpr, TILE: tl.constexpr):
    """Return [rows, TILE] elements from row[i] on; 0 past SIZE and for rows that are not wanted."""
    col = tl.arange(0, TILE)
    return tl.load(ptr + (row[:, None] + col[None, :]), mask=wanted[:, None] & (col < SIZE)[None, :], other=0)


@triton.jit
def store_rows(ptr, row, elements, wanted, SIZE: tl.constexpr, TILE: tl.constexpr):
    col = tl.arange(0, TILE)
    tl.store(ptr + (row[:, None] + col[None, :]), elements, mask=wanted[:, None] & (col < SIZE)[None, :])


@triton.jit
def run_offsets(row, run_stride, wanted, SIZE: tl.constexpr, TILE: tl.constexpr, RUN: tl.constexpr):
    """Return [runs, rows, RUN] offsets, element d in run d // RUN, and whether the elements are wanted.

    Neighbouring threads must take neighbouring tokens. Where no dimension is known to be contiguous, threads follow the
    last one, but up to Triton 3.6 the first: for that, rows come before runs.
    """
    run = tl.arange(0, TILE // RUN)
    col = tl.arange(0, RUN)[None, None, :]
    if ROWS_FIRST:
        run = run[None, :, None]
        offsets = row[:, None, None] + (run.to(tl.int64) * run_stride + col)
        mask = wanted[:, None, None] & (run * RUN + col < SIZE)
    else:
        run = run[:, None, None]
        offsets = row[None, :, None] + run.to(tl.int64) * run_stride + col
        mask = wanted[None, :, None] & (run * RUN + col < SIZE)
    return offsets, mask


@triton.jit
def load_runs(ptr, row, run_stride, wanted, SIZE: tl.constexpr, TILE: tl.constexpr, RUN: tl.constexpr):
    """Do load_rows where a row is in runs."""
    offsets, mask = run_offsets(row, run_stride, wanted, SIZE, TILE, RUN)
    runs = tl.load(ptr + offsets, mask=mask, other=0)
    if not ROWS_FIRST:
        runs = tl.permute(runs, (1, 0, 2))
    return tl.reshape(runs, (row.shape[0], TILE))


@triton.jit
def store_runs(ptr, row, run_stride, elements, wanted, SIZE: tl.constexpr, TILE: tl.constexpr, RUN: tl.constexpr):
    runs = tl.reshape(elements, (row.shape[0], TILE // RUN, RUN))
    if not ROWS_FIRST:
        runs = tl.permute(runs, (1, 0, 2))
    offsets, mask = run_offsets(row, run_stride, wanted, SIZE, TILE, RUN)
    tl.store(ptr + offsets, runs, mask=mask)


@triton.jit
def keep_rows(
    elements,  # [rows, TILE], as bits
    cache_ptr,
    place,  # [rows] offsets of the rows' first elements in the cache
    run_stride,
    scale_ptr,  # fp32, or None
    scale_at,  # [rows] offsets of the rows' scales
    inside,  # [rows] whether there is such a row
    wanted,  # [rows] whether it has a place
    PART: tl.constexpr,  # a Part of ROWS
    ROWS: tl.constexpr,  # RowConstants
):
    """Write elements of rows to their places in the cache, quantised as the cache is."""
    SIZE: tl.constexpr = PART.value.SIZE
    TILE: tl.constexpr = PART.value.TILE
    RUN: tl.constexpr = PART.value.RUN
    ROW: tl.constexpr = ROWS.value.ROW
    CODE: tl.constexpr = ROWS.value.CODE
    if CODE == "int8":
        elements, scales = encode_int8(to_fp32(elements, ROW))
        tl.store(scale_ptr + scale_at, scales, mask=wanted)
    elif CODE != "bits":
        scales = None if scale_ptr is None else tl.load(scale_ptr + scale_at, mask=inside, other=1)
        elements = encode_fp8(to_fp32(elements, ROW), scales, CODE)
    if RUN == 0:
        store_rows(cache_ptr, place, elements, wanted, SIZE, TILE)
    else:
        store_runs(cache_ptr, place, run_stride, elements, wanted, SIZE, TILE, RUN)


@triton.jit
def into_cache(
    row_ptr,
    row,  # [rows] offsets of rows
    cache_ptr,
    place,  # [rows] offsets of the rows' first elements in the cache
    run_stride,
    scale_ptr,  # fp32, or None
    scale_at,  # [rows] offsets of the rows' scales
    inside,  # [rows] whether there is such a row
    wanted,  # [rows] whether it has a place
    PART: tl.constexpr,  # a Part of ROWS
    ROWS: tl.constexpr,  # RowConstants
):
    """Write rows to their places in the cache, quantised as the cache is."""
    elements = load_rows(row_ptr, row, inside, PART.value.SIZE, PART.value.TILE)
    keep_rows(elements, cache_ptr, place, run_stride, scale_ptr, scale_at, inside, wanted, PART, ROWS)


@triton.jit
def out_of_cache(
    row_ptr, row, cache_ptr, place, run_stride, scale_ptr, scale_at, wanted, PART: tl.constexpr, ROWS: tl.constexpr
):
    """Read rows from their places in the cache; the arguments are as of into_cache."""
    SIZE: tl.constexpr = PART.value.SIZE
    TILE: tl.constexpr = PART.value.TILE
    RUN: tl.constexpr = PART.value.RUN
    ROW: tl.constexpr = ROWS.value.ROW
    CODE: tl.constexpr = ROWS.value.CODE
    if RUN == 0:
        elements = load_rows(cache_ptr, place, wanted, SIZE, TILE)
    else:
        elements = load_runs(cache_ptr, place, run_stride, wanted, SIZE, TILE, RUN)
    if CODE != "bits":
        numbers = elements.to(tl.float32) if CODE == "int8" else decode_fp8(elements, CODE)
        if scale_ptr is not None:
            numbers = numbers * tl.load(scale_ptr + scale_at, mask=wanted, other=1)[:, None]
        elements = from_fp32(numbers, ROW)
    store_rows(row_ptr, row, elements, wanted, SIZE, TILE)


@triton.jit
def report(bad, error_ptr, BIT: tl.constexpr):
    """Set BIT of the error word if any of `bad` is true."""
    if tl.max(bad.to(tl.int32), 0) > 0:
        tl.atomic_or(error_ptr, BIT)

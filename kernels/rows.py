"""What the kernels share: rows of one head of one token, copied in tiles, whatever they mean.

a tile: TILE_ROWS rows, each the SIZE elements of one head of one token
        row = token * num_heads + head: no head count and no head size is rounded up, but for the masked end
"""

import torch
import triton
import triton.language as tl

TILE_ELEMENTS = 2048  # 16 for each thread of 4 warps; twice as many spill where rows are not aligned
MAX_TILE_ROWS = 128  # one a thread: the addresses of more would not fit into registers

BAD_SLOT = 1  # bits of the error word
BAD_BLOCK = 2

_BY_WIDTH = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers: a copy asks only for the width, and so keeps every bit of a NaN."""
    return tensor.view(_BY_WIDTH[tensor.element_size()])


def tile_of(key_size: int, value_size: int) -> dict[str, int]:
    """The constants of a launch that moves rows of these sizes."""
    key_tile, value_tile = triton.next_power_of_2(key_size), triton.next_power_of_2(value_size)
    return {
        "KEY_SIZE": key_size,
        "VALUE_SIZE": value_size,
        "KEY_TILE": key_tile,
        "VALUE_TILE": value_tile,
        "TILE_ROWS": min(max(TILE_ELEMENTS // max(key_tile, value_tile), 1), MAX_TILE_ROWS),
    }


@triton.jit
def copy_rows(dst_ptr, dst_row, src_ptr, src_row, wanted, SIZE: tl.constexpr, TILE: tl.constexpr):
    """Copies SIZE elements from src_row[i] to dst_row[i] (int64 element offsets) for each i that is wanted."""
    col = tl.arange(0, TILE)
    mask = wanted[:, None] & (col < SIZE)[None, :]
    values = tl.load(src_ptr + (src_row[:, None] + col[None, :]), mask=mask)
    tl.store(dst_ptr + (dst_row[:, None] + col[None, :]), values, mask=mask)


@triton.jit
def report(bad, error_ptr, BIT: tl.constexpr):
    """Sets BIT of the error word if any of `bad` is true."""
    if tl.max(bad.to(tl.int32), 0) > 0:
        tl.atomic_or(error_ptr, BIT)

"""The distance of each row of K or V from the retrieved one: one pass over both, sums in fp32."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kvpage.kernels.arguments import _ROWS
from kvpage.kernels.constants import Constants
from kvpage.kernels.prepared import Prepared, PreparedKinds, form
from kvpage.kernels.quantize import to_fp32

MOST_COLUMNS = 1024  # of a row at once


@dataclass(frozen=True, slots=True)
class DeviationConstants(Constants):
    """How rows are cut into tiles. COLUMNS: of a row at once, a power of two. ROW: see kvpage.kernels.quantize."""

    NUM_HEADS: int
    SIZE: int
    COLUMNS: int
    TILE_ROWS: int
    ROW: str


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["valid_ptr", "out_ptr"])
def row_deviation_kernel(
    fresh_ptr, retrieved_ptr,  # [num_rows, NUM_HEADS, SIZE]
    valid_ptr,  # int8 [num_rows]
    out_ptr,  # fp32 [num_rows]
    num_rows,
    fresh_row_stride, fresh_head_stride,  # all strides in elements
    retrieved_row_stride, retrieved_head_stride,
    ROWS: tl.constexpr,  # DeviationConstants
):  # fmt: skip
    NUM_HEADS: tl.constexpr = ROWS.value.NUM_HEADS
    SIZE: tl.constexpr = ROWS.value.SIZE
    COLUMNS: tl.constexpr = ROWS.value.COLUMNS
    TILE_ROWS: tl.constexpr = ROWS.value.TILE_ROWS
    ROW: tl.constexpr = ROWS.value.ROW
    row = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    inside = row < num_rows
    valid = inside & (tl.load(valid_ptr + row, mask=inside, other=0) != 0)
    sums = tl.zeros([TILE_ROWS, COLUMNS], tl.float32)
    for head in range(0, NUM_HEADS):
        for begin in range(0, SIZE, COLUMNS):
            col = begin + tl.arange(0, COLUMNS)
            mask = valid[:, None] & (col < SIZE)[None, :]
            a = tl.load(
                fresh_ptr + (row * fresh_row_stride + head * fresh_head_stride)[:, None] + col[None, :],
                mask=mask,
                other=0,
            )
            b = tl.load(
                retrieved_ptr + (row * retrieved_row_stride + head * retrieved_head_stride)[:, None] + col[None, :],
                mask=mask,
                other=0,
            )
            difference = to_fp32(a, ROW) - to_fp32(b, ROW)
            sums += difference * difference
    tl.store(out_ptr + row, tl.sum(sums, 1) / (NUM_HEADS * SIZE), mask=inside)


def row_deviation(fresh: torch.Tensor, retrieved: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """See kvpage.ops.row_deviation, which has checked everything."""
    num_rows = len(fresh)
    out = torch.zeros(num_rows, device=fresh.device)
    if fresh.numel() == 0:
        return out
    kind = fresh.device, form(fresh), form(retrieved)
    known: tuple[DeviationConstants, Prepared] | None = _kinds.get(kind)
    if known is None:
        known = _prepared(fresh, retrieved)
        _kinds.keep(kind, known)
    constants, prepared = known
    tensors = fresh, retrieved, valid.contiguous().view(torch.int8), out
    prepared.launch((triton.cdiv(num_rows, constants.TILE_ROWS), 1, 1), tensors, (num_rows,))
    return out


_kinds = PreparedKinds()


def _prepared(fresh: torch.Tensor, retrieved: torch.Tensor) -> tuple[DeviationConstants, Prepared]:
    _, num_heads, size = fresh.shape
    if fresh.stride(1) == size == retrieved.stride(1):
        num_heads, size = 1, num_heads * size
    constants = deviation_constants(num_heads, size, fresh.dtype)
    fixed = *fresh.stride()[:2], *retrieved.stride()[:2], constants
    options = {"enable_fp_fusion": False}  # each lane of a warp rounds its sum of squares alike
    return constants, Prepared(row_deviation_kernel, fixed, options, 2, range(2))


def deviation_constants(num_heads: int, size: int, dtype: torch.dtype) -> DeviationConstants:
    """Cut rows into tiles."""
    columns = min(triton.next_power_of_2(size), MOST_COLUMNS)
    return DeviationConstants(num_heads, size, columns, MOST_COLUMNS // columns, _ROWS[dtype])

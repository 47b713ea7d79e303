"""Products of rows with weights, out = x @ weight.T + bias, whose sums do not depend on how many rows there are.

    rows        0 ... 63 | 64 ... 127 | ...      TILE_ROWS at a time, whatever their number: missing ones are zeros
    columns     0 ... 63 | ...                   of `out`
    k           0 ... 63 | 64 ... | rest         one after the other, into one fp32 sum for each element of `out`

There is one machine code for all numbers of rows, without splits along k. A row of a tensor core's product reads no
other row, so an element of `out` is made of its row, its column and the order of k alone. A library takes another
kernel for other numbers of rows.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from kvpage.kernels.arguments import _ROWS
from kvpage.kernels.constants import Constants
from kvpage.kernels.prepared import Prepared, PreparedKinds
from kvpage.kernels.quantize import INTERPRETED, from_fp32
from kvpage.kernels.row_grid import RowGrid

TILE_ROWS = 64  # as many as sm_90 multiplies by one instruction
TILE_COLUMNS = 64
TILE_BYTES = 128  # of a row along k: a line of shared memory


@dataclass(frozen=True, slots=True)
class LinearConstants(Constants):
    """How a product is cut, by sizes and dtype alone.

    SIZE: elements along k. TILE_SIZE: of them at a time. ROW: see kvpage.kernels.quantize.
    """

    SIZE: int
    TILE_ROWS: int
    TILE_COLUMNS: int
    TILE_SIZE: int
    ROW: str

    @property
    def IS_WHOLE(self) -> bool:
        """Whether no tile along k has a rest."""
        return self.SIZE % self.TILE_SIZE == 0

    @property
    def options(self) -> dict[str, Any]:
        """Options of the launch. Products and sums round by themselves outside of tensor cores."""
        return {"num_warps": 4, "num_stages": 3, "enable_fp_fusion": False}


@triton.jit
def operand(elements):
    """Return loaded elements as a product takes them: the interpreter has no bf16."""
    if INTERPRETED:
        return elements.to(tl.float32)
    else:
        return elements


@triton.jit
def rounded(sums, ROW: tl.constexpr):
    """Return fp32 sums as elements of a row."""
    if ROW == "bf16":
        return from_fp32(sums, ROW).to(tl.bfloat16, bitcast=True)
    elif ROW == "fp16":
        return sums.to(tl.float16)
    else:
        return sums


# The number of rows is not specialised on: one machine code serves them all.
@triton.jit(do_not_specialize=["num_rows", "num_columns", "inner"])
def linear_kernel(
    x_ptr,  # rows of SIZE
    weight_ptr,  # [num_columns, SIZE]
    bias_ptr,  # [num_columns]; or None
    out_ptr,  # [num_rows, num_columns], contiguous
    num_rows, num_columns, inner,  # inner: see RowGrid
    outer_stride, inner_stride, column_stride, size_stride,  # in elements; the latter two of the weight
    LINEAR: tl.constexpr,  # LinearConstants
):  # fmt: skip
    SIZE: tl.constexpr = LINEAR.value.SIZE
    TILE_ROWS: tl.constexpr = LINEAR.value.TILE_ROWS
    TILE_COLUMNS: tl.constexpr = LINEAR.value.TILE_COLUMNS
    TILE_SIZE: tl.constexpr = LINEAR.value.TILE_SIZE
    ROW: tl.constexpr = LINEAR.value.ROW
    IS_WHOLE: tl.constexpr = LINEAR.value.IS_WHOLE
    row_tiles = (num_rows + TILE_ROWS - 1) // TILE_ROWS
    row = (tl.program_id(0) % row_tiles).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column = (tl.program_id(0) // row_tiles).to(tl.int64) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    has_row, has_column = (row < num_rows)[:, None], (column < num_columns)[:, None]
    x_row = x_ptr + (row // inner * outer_stride + row % inner * inner_stride)[:, None]
    weight_row = weight_ptr + (column * column_stride)[:, None]
    sums = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
    for begin in range(0, SIZE, TILE_SIZE):
        k = (begin + tl.arange(0, TILE_SIZE))[None, :]
        row_mask, column_mask = has_row, has_column
        if not IS_WHOLE:
            row_mask, column_mask = row_mask & (k < SIZE), column_mask & (k < SIZE)
        x = tl.load(x_row + k, mask=row_mask, other=0.0)
        weight = tl.load(weight_row + k.to(tl.int64) * size_stride, mask=column_mask, other=0.0)
        sums = tl.dot(operand(x), tl.trans(operand(weight)), sums, input_precision="ieee")
    column = column[None, :]
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + column, mask=column < num_columns, other=0.0).to(tl.float32)
    to = out_ptr + (row[:, None] * num_columns + column)
    tl.store(to, rounded(sums, ROW), mask=has_row & (column < num_columns))


def linear(
    x: torch.Tensor,
    grid: RowGrid,
    weight: torch.Tensor,  # [columns, grid.size] of the same dtype, with any strides
    bias: torch.Tensor | None,  # [columns], contiguous, likewise
    out: torch.Tensor,  # [..., columns], contiguous, as many rows
) -> None:
    """Write x @ weight.T + bias for the rows of `x` that the grid describes. Sums are in fp32, and rounded once."""
    num_columns, size = weight.shape
    if grid.num_rows == 0 or num_columns == 0:
        return
    strides = grid.outer_stride, grid.inner_stride, *weight.stride()
    kind = x.device, x.dtype, size, strides, bias is None
    known: tuple[LinearConstants, Prepared] | None = _kinds.get(kind)
    if known is None:
        constants = linear_constants(size, x.dtype)
        known = constants, Prepared(linear_kernel, (*strides, constants), constants.options, 0, range(4))
        _kinds.keep(kind, known)
    constants, prepared = known
    num_tiles = triton.cdiv(grid.num_rows, TILE_ROWS) * triton.cdiv(num_columns, TILE_COLUMNS)
    prepared.launch((num_tiles, 1, 1), (x, weight, bias, out), (grid.num_rows, num_columns, grid.inner))


_kinds = PreparedKinds()


def linear_constants(size: int, dtype: torch.dtype) -> LinearConstants:
    """Cut a product: never by its number of rows."""
    return LinearConstants(size, TILE_ROWS, TILE_COLUMNS, TILE_BYTES // dtype.itemsize, _ROWS[dtype])

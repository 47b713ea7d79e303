"""The root mean square norm of rows, as kvpage.ops.rms_norm has it: each row is read once, in one launch for all.

    out = x / sqrt(mean(x**2) + eps) * (weight + weight_offset)

Rows lie in two dimensions of their own strides, as the heads of tokens do after a product for several layers.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kvpage.kernels.arguments import _ROWS, TILE_ELEMENTS
from kvpage.kernels.constants import Constants
from kvpage.kernels.prepared import Prepared, PreparedKinds
from kvpage.kernels.quantize import from_fp32, to_fp32
from kvpage.kernels.row_grid import RowGrid

MOST_WARPS = 16


@dataclass(frozen=True, slots=True)
class NormConstants(Constants):
    """How rows are cut into tiles.

    SIZE: elements of a row.
    COLUMNS: as many or more, a power of two.
    ROW: the type of an element, see kvpage.kernels.quantize.
    ROUNDS: whether normalised numbers are rounded before their product with the weight.
    """

    SIZE: int
    COLUMNS: int
    TILE_ROWS: int
    ROW: str
    ROUNDS: bool

    @property
    def num_warps(self) -> int:
        """Number the warps of a program: each thread has as many elements whatever the tile."""
        return min(max(4 * self.TILE_ROWS * self.COLUMNS // TILE_ELEMENTS, 4), MOST_WARPS)


@triton.jit(do_not_specialize=["num_rows", "inner"])
def rms_norm_kernel(
    x_ptr,  # [outer, inner, SIZE], as integers
    weight_ptr,  # [SIZE]
    out_ptr,  # [num_rows, SIZE]
    num_rows,
    inner,
    eps,
    weight_offset,
    outer_stride, inner_stride,  # in elements
    NORM: tl.constexpr,  # NormConstants
):  # fmt: skip
    SIZE: tl.constexpr = NORM.value.SIZE
    TILE_ROWS: tl.constexpr = NORM.value.TILE_ROWS
    ROW: tl.constexpr = NORM.value.ROW
    row = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    col = tl.arange(0, NORM.value.COLUMNS)[None, :]
    mask = (row < num_rows)[:, None] & (col < SIZE)
    start = row // inner * outer_stride + row % inner * inner_stride
    x = to_fp32(tl.load(x_ptr + start[:, None] + col, mask=mask, other=0), ROW)
    weight = to_fp32(tl.load(weight_ptr + col, mask=col < SIZE, other=0), ROW) + weight_offset
    root = tl.sqrt_rn(tl.sum(x * x, 1) / SIZE + eps)
    normal = x * tl.div_rn(tl.full([TILE_ROWS], 1.0, tl.float32), root)[:, None]
    if NORM.value.ROUNDS:
        normal = to_fp32(from_fp32(normal, ROW), ROW)
    tl.store(out_ptr + (row * SIZE)[:, None] + col, from_fp32(normal * weight, ROW), mask=mask)


def rms_norm(
    x: torch.Tensor,
    grid: RowGrid,
    weight: torch.Tensor,  # [grid.size], contiguous, of the same dtype
    out: torch.Tensor,  # as many rows, contiguous
    eps: float,
    weight_offset: float,
    rounds_before_weight: bool,
) -> None:
    """Write the norms of the rows of `x` that the grid describes. See kvpage.ops.rms_norm."""
    if grid.num_rows == 0:
        return
    kind = x.device, x.dtype, grid.outer_stride, grid.inner_stride, grid.size, rounds_before_weight
    known: tuple[NormConstants, Prepared] | None = _kinds.get(kind)
    if known is None:
        constants = norm_constants(grid.size, x.dtype, rounds_before_weight)
        fixed = grid.outer_stride, grid.inner_stride, constants
        options = {"num_warps": constants.num_warps, "enable_fp_fusion": False}  # sums as the reference's
        known = constants, Prepared(rms_norm_kernel, fixed, options, 3, range(3))
        _kinds.keep(kind, known)
    constants, prepared = known
    num_tiles = triton.cdiv(grid.num_rows, constants.TILE_ROWS)
    prepared.launch((num_tiles, 1, 1), (x, weight, out), (grid.num_rows, grid.inner, eps, weight_offset))


_kinds = PreparedKinds()


def norm_constants(size: int, dtype: torch.dtype, rounds: bool) -> NormConstants:
    """Cut rows into tiles: small rows together, a large one by itself."""
    columns = triton.next_power_of_2(size)
    return NormConstants(size, columns, max(TILE_ELEMENTS // columns, 1), _ROWS[dtype], rounds)

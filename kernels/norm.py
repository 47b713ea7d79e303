"""The root mean square norm of rows, as kvpage.ops.rms_norm has it: each row is read once, in one launch for all.

    out = x / sqrt(mean(x**2) + eps) * (weight + weight_offset)

Rows lie in two dimensions of their own strides, as the heads of tokens do after a product for several layers.

Between two modules of a layer there are up to two norms and a sum. These are one launch, too:

    total = residual + x, or residual + norm(x)       rounded, as the model's own sum is
    out = another norm(total)
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
from kvpage.layout.row_norm import RowNorm

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


@dataclass(frozen=True, slots=True)
class SumConstants(Constants):
    """How rows are cut into tiles, and which norms there are.

    NORM: of either norm; its ROUNDS is the first one's.
    NORMS_ROWS: whether x is normed before the sum. NORMS_SUM: whether the sum is normed.
    ROUNDS: of the norm of the sum.
    """

    NORM: NormConstants
    NORMS_ROWS: bool
    NORMS_SUM: bool
    ROUNDS: bool


@triton.jit
def root_of(x, eps, SIZE: tl.constexpr):
    """Return the root of the mean square of each row [rows, COLUMNS] in fp32, 0 past SIZE."""
    return tl.sqrt_rn(tl.sum(x * x, 1) / SIZE + eps)


@triton.jit
def scaled(x, root, weight, ROW: tl.constexpr, ROUNDS: tl.constexpr):
    """Return x / root * weight as bits. weight: [COLUMNS] or [1, COLUMNS] in fp32, with its offset."""
    normal = x * tl.div_rn(tl.full(root.shape, 1.0, tl.float32), root)[:, None]
    if ROUNDS:
        normal = to_fp32(from_fp32(normal, ROW), ROW)
    return from_fp32(normal * weight, ROW)


@triton.jit
def normed(x, weight_ptr, eps, weight_offset, NORM: tl.constexpr, ROUNDS: tl.constexpr):
    """Return the norms of rows [TILE_ROWS, COLUMNS] in fp32, 0 past SIZE, as bits."""
    SIZE: tl.constexpr = NORM.value.SIZE
    ROW: tl.constexpr = NORM.value.ROW
    col = tl.arange(0, NORM.value.COLUMNS)[None, :]
    weight = to_fp32(tl.load(weight_ptr + col, mask=col < SIZE, other=0), ROW) + weight_offset
    return scaled(x, root_of(x, eps, SIZE), weight, ROW, ROUNDS)


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
    ROUNDS: tl.constexpr = NORM.value.ROUNDS
    tl.store(out_ptr + (row * SIZE)[:, None] + col, normed(x, weight_ptr, eps, weight_offset, NORM, ROUNDS), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def add_norm_kernel(
    x_ptr, residual_ptr,  # [num_rows, SIZE], as integers
    x_weight_ptr, weight_ptr,  # [SIZE]; None for no norm
    total_ptr, out_ptr,  # [num_rows, SIZE]; out_ptr is None where the sum is not normed
    num_rows,
    x_eps, x_weight_offset, eps, weight_offset,
    x_stride, residual_stride,  # in elements
    SUM: tl.constexpr,  # SumConstants
):  # fmt: skip
    NORM: tl.constexpr = SUM.value.NORM
    SIZE: tl.constexpr = NORM.value.SIZE
    TILE_ROWS: tl.constexpr = NORM.value.TILE_ROWS
    ROW: tl.constexpr = NORM.value.ROW
    row = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    col = tl.arange(0, NORM.value.COLUMNS)[None, :]
    mask = (row < num_rows)[:, None] & (col < SIZE)
    x = to_fp32(tl.load(x_ptr + (row * x_stride)[:, None] + col, mask=mask, other=0), ROW)
    residual = to_fp32(tl.load(residual_ptr + (row * residual_stride)[:, None] + col, mask=mask, other=0), ROW)
    if SUM.value.NORMS_ROWS:
        FIRST_ROUNDS: tl.constexpr = NORM.value.ROUNDS
        x = to_fp32(normed(x, x_weight_ptr, x_eps, x_weight_offset, NORM, FIRST_ROUNDS), ROW)
    total = from_fp32(residual + x, ROW)
    to = (row * SIZE)[:, None] + col
    tl.store(total_ptr + to, total, mask=mask)
    if SUM.value.NORMS_SUM:
        ROUNDS: tl.constexpr = SUM.value.ROUNDS
        out = normed(to_fp32(total, ROW), weight_ptr, eps, weight_offset, NORM, ROUNDS)
        tl.store(out_ptr + to, out, mask=mask)


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


def add_norm(
    x: torch.Tensor,
    x_grid: RowGrid,
    residual: torch.Tensor,
    residual_grid: RowGrid,
    x_norm: RowNorm | None,
    sum_norm: RowNorm | None,
    total: torch.Tensor,  # as many rows, contiguous
    out: torch.Tensor | None,  # the same; None without sum_norm
) -> None:
    """Write residual + x, or residual + norm(x), and the norm of this sum. Rows of each have one stride."""
    if x_grid.num_rows == 0:
        return
    rounds = [None if norm is None else norm.rounds_before_weight for norm in (x_norm, sum_norm)]
    kind = x.device, x.dtype, x_grid.size, x_grid.outer_stride, residual_grid.outer_stride, *rounds
    known: tuple[NormConstants, Prepared] | None = _sum_kinds.get(kind)
    if known is None:
        constants = sum_constants(x_grid.size, x.dtype, *rounds)
        fixed = x_grid.outer_stride, residual_grid.outer_stride, constants
        options = {"num_warps": constants.NORM.num_warps, "enable_fp_fusion": False}  # sums as the reference's
        known = constants.NORM, Prepared(add_norm_kernel, fixed, options, 6, range(6))
        _sum_kinds.keep(kind, known)
    tiles, prepared = known
    weights = [None if norm is None else norm.weight for norm in (x_norm, sum_norm)]
    numbers = [number for norm in (x_norm, sum_norm) for number in ((0.0, 0.0) if norm is None else norm[1:3])]
    num_tiles = triton.cdiv(x_grid.num_rows, tiles.TILE_ROWS)
    prepared.launch((num_tiles, 1, 1), (x, residual, *weights, total, out), (x_grid.num_rows, *numbers))


_kinds = PreparedKinds()
_sum_kinds = PreparedKinds()


def norm_constants(size: int, dtype: torch.dtype, rounds: bool) -> NormConstants:
    """Cut rows into tiles: small rows together, a large one by itself."""
    columns = triton.next_power_of_2(size)
    return NormConstants(size, columns, max(TILE_ELEMENTS // columns, 1), _ROWS[dtype], rounds)


def sum_constants(size: int, dtype: torch.dtype, x_rounds: bool | None, rounds: bool | None) -> SumConstants:
    """Cut rows into tiles as norms alone do. x_rounds, rounds: of each norm; None for no norm."""
    return SumConstants(
        norm_constants(size, dtype, bool(x_rounds)), x_rounds is not None, rounds is not None, bool(rounds)
    )

"""The activation of a gated MLP times its other factor: out = activation(gate) * up, rounded as the model's own two."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kvpage.kernels.arguments import _ROWS
from kvpage.kernels.constants import Constants
from kvpage.kernels.prepared import Prepared, PreparedKinds
from kvpage.kernels.quantize import from_fp32, to_fp32
from kvpage.kernels.row_grid import RowGrid

TILE = 1024  # elements of a row that a program takes


@dataclass(frozen=True, slots=True)
class GateConstants(Constants):
    """SIZE: elements of a row. TILE: of it at once. TILES: of a row. ROW: see kvpage.kernels.quantize."""

    SIZE: int
    TILE: int
    ROW: str
    ACTIVATION: str

    @property
    def TILES(self) -> int:
        """Tiles of a row."""
        return -(-self.SIZE // self.TILE)

    @property
    def IS_SILU(self) -> bool:
        """Whether the activation is x * sigmoid(x); else it is GELU by tanh."""
        return self.ACTIVATION == "silu"


@triton.jit
def silu(x):
    """Return x * sigmoid(x)."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def gelu_tanh(x):
    """Return GELU by its formula with tanh(y) = 1 - 2 / (1 + exp(2 y))."""
    y = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    return 0.5 * x * (2.0 - 2.0 / (1.0 + tl.exp(2.0 * y)))


@triton.jit
def gate_kernel(
    gate_ptr, up_ptr,  # rows of SIZE, as integers
    out_ptr,  # [num_rows, SIZE]
    gate_stride, up_stride,  # in elements
    GATE: tl.constexpr,  # GateConstants
):  # fmt: skip
    SIZE: tl.constexpr = GATE.value.SIZE
    TILE: tl.constexpr = GATE.value.TILE
    TILES: tl.constexpr = GATE.value.TILES
    ROW: tl.constexpr = GATE.value.ROW
    row = tl.program_id(0).to(tl.int64) // TILES
    col = tl.program_id(0) % TILES * TILE + tl.arange(0, TILE)
    mask = col < SIZE
    x = to_fp32(tl.load(gate_ptr + row * gate_stride + col, mask=mask, other=0), ROW)
    up = to_fp32(tl.load(up_ptr + row * up_stride + col, mask=mask, other=0), ROW)
    activated = silu(x) if GATE.value.IS_SILU else gelu_tanh(x)
    activated = to_fp32(from_fp32(activated, ROW), ROW)
    tl.store(out_ptr + row * SIZE + col, from_fp32(activated * up, ROW), mask=mask)


def gate(
    gates: torch.Tensor,
    gate_rows: RowGrid,
    ups: torch.Tensor,
    up_rows: RowGrid,
    out: torch.Tensor,
    activation: str,  # "silu" or "gelu_tanh"
) -> None:
    """Write activation(gates) * ups. Rows of each have one stride."""
    if gate_rows.num_rows == 0 or gate_rows.size == 0:
        return
    kind = gates.device, gates.dtype, gate_rows.size, gate_rows.outer_stride, up_rows.outer_stride, activation
    known: tuple[GateConstants, Prepared] | None = _kinds.get(kind)
    if known is None:
        constants = gate_constants(gate_rows.size, gates.dtype, activation)
        fixed = gate_rows.outer_stride, up_rows.outer_stride, constants
        known = constants, Prepared(gate_kernel, fixed, {"num_warps": 4, "enable_fp_fusion": False}, 3, range(3))
        _kinds.keep(kind, known)
    constants, prepared = known
    prepared.launch((gate_rows.num_rows * constants.TILES, 1, 1), (gates, ups, out), ())


_kinds = PreparedKinds()


def gate_constants(size: int, dtype: torch.dtype, activation: str) -> GateConstants:
    """Cut rows into tiles."""
    return GateConstants(size, min(triton.next_power_of_2(size), TILE), _ROWS[dtype], activation)

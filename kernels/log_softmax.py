"""The logarithm of softmax of rows, in fp32: one program a row, over blocks of columns in one order.

    largest ─► sum of exp(x - largest) ─► x - largest - log(sum)        each a pass over the row

A row's numbers depend on the row alone. A library's kernel follows from the number of rows and their alignment.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kvpage.kernels.constants import Constants
from kvpage.kernels.prepared import Prepared, PreparedKinds

BLOCK = 4096
OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}


@dataclass(frozen=True, slots=True)
class SoftmaxConstants(Constants):
    """BLOCK: columns at a time, whatever the size of a row."""

    BLOCK: int


@triton.jit(do_not_specialize=["num_columns"], do_not_specialize_on_alignment=["x_ptr", "out_ptr"])
def log_softmax_kernel(
    x_ptr,  # fp32 [num_rows, num_columns]
    out_ptr,  # likewise, contiguous
    num_columns,
    row_stride,  # in elements
    SOFTMAX: tl.constexpr,  # SoftmaxConstants
):
    BLOCK: tl.constexpr = SOFTMAX.value.BLOCK
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * row_stride
    out_ptr += row * num_columns
    column = tl.arange(0, BLOCK)
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    for begin in range(0, num_columns, BLOCK):
        x = tl.load(x_ptr + begin + column, mask=begin + column < num_columns, other=float("-inf"))
        largest = tl.maximum(largest, x)
    top = tl.max(largest, 0)
    sums = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, num_columns, BLOCK):
        x = tl.load(x_ptr + begin + column, mask=begin + column < num_columns, other=float("-inf"))
        sums += tl.exp(x - top)
    log_sum = tl.log(tl.sum(sums, 0))
    for begin in range(0, num_columns, BLOCK):
        mask = begin + column < num_columns
        x = tl.load(x_ptr + begin + column, mask=mask, other=0.0)
        tl.store(out_ptr + begin + column, x - top - log_sum, mask=mask)


def log_softmax(x: torch.Tensor, out: torch.Tensor) -> None:
    """Write the logarithms of rows of `x`, fp32 [num_rows, num_columns] whose last dimension is contiguous."""
    num_rows, num_columns = x.shape
    if num_rows == 0 or num_columns == 0:
        return
    kind = x.device, x.stride(0)
    known: Prepared | None = _kinds.get(kind)
    if known is None:
        known = Prepared(log_softmax_kernel, (x.stride(0), SoftmaxConstants(BLOCK)), OPTIONS, 0, ())
        _kinds.keep(kind, known)
    known.launch((num_rows, 1, 1), (x, out), (num_columns,))


_kinds = PreparedKinds()

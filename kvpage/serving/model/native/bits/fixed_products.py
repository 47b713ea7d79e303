"""Products of torch's operators, by the C++ core: the sums of a row are taken in an order that its size alone decides.

mm, addmm           rows @ weight          the weight is read by columns: as it lies, where a layer has turned it,
bmm, baddbmm        one for each matrix    or from a copy
_grouped_mm         one for each expert    of the rows that chose it
convolution         one for each group     of the columns that a token sees; of one channel, products of two numbers
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

import kvpage._C as _C
from kvpage.ops.args.tokens import ROW_TYPES
from kvpage.ops.cpu.experts import grouped_linear
from kvpage.ops.cpu.operands import NO_ROWS, as_rows, flat, place_of


class UnfixedProduct(ValueError):
    """A product of a form that the core does not take; the message says which."""


def multiply(
    rows: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None = None, *, num_threads: int
) -> torch.Tensor:
    """Return rows [n, size] @ matrix [size, columns] + bias [columns]. Raise UnfixedProduct for other dtypes."""
    kinds = {part.dtype for part in (rows, matrix, bias) if part is not None}
    if len(kinds) != 1 or rows.dtype not in ROW_TYPES:
        raise UnfixedProduct(f"of {', '.join(sorted(str(kind) for kind in kinds))}")
    rows, weight = as_rows(rows), as_rows(matrix.t())
    addend = None if bias is None else flat(bias)
    out = rows.new_empty((rows.shape[0], weight.shape[0]))
    _C.linear(
        place_of(rows),
        place_of(weight),
        NO_ROWS,
        0 if addend is None else addend.data_ptr(),
        place_of(out),
        (rows.shape[0], weight.shape[0], rows.shape[1]),
        ROW_TYPES[rows.dtype],
        0,
        num_threads,
    )
    return out


def product(name: str, args: Sequence[Any], kwargs: dict[str, Any], num_threads: int) -> torch.Tensor:
    """Return what torch.ops.aten's operator of that name in PRODUCTS would, up to rounding.

    num_threads: that may compute. Raise UnfixedProduct for forms that the core does not take.
    """
    if any(value not in (1, None) for value in kwargs.values()):
        raise UnfixedProduct(f"with {', '.join(kwargs)}")
    return _PRODUCTS[name](num_threads, *args)


def _mm(num_threads: int, rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    return multiply(rows, matrix, num_threads=num_threads)


def _addmm(num_threads: int, addend: torch.Tensor, rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    if addend.dim() == 1 and len(addend) == matrix.shape[1]:
        return multiply(rows, matrix, addend, num_threads=num_threads)
    return multiply(rows, matrix, num_threads=num_threads) + addend


def _bmm(num_threads: int, rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    out = rows.new_empty((*rows.shape[:2], matrices.shape[2]))
    for result, part, matrix in zip(out, rows, matrices, strict=True):
        result.copy_(multiply(part, matrix, num_threads=num_threads))
    return out


def _baddbmm(num_threads: int, addend: torch.Tensor, rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    return _bmm(num_threads, rows, matrices) + addend


def _grouped(
    num_threads: int,
    rows: torch.Tensor,
    matrices: torch.Tensor,
    ends: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return rows [n, size] @ matrices [groups, size, columns], those before ends[i] by the matrix of group i."""
    is_usual = ends is not None and bias is None and dtype in (None, rows.dtype) and rows.dtype in ROW_TYPES
    if rows.dim() != 2 or matrices.dim() != 3 or ends is None or not is_usual or matrices.dtype != rows.dtype:
        raise UnfixedProduct("of groups of another form")
    out = rows.new_zeros((len(rows), matrices.shape[2]))
    is_turned, until = matrices.stride(2) == 1, np.asarray(ends.tolist(), np.int64)
    weight = matrices if is_turned else matrices.transpose(1, 2)
    count = int(until[-1])
    out[:count] = grouped_linear(rows, np.arange(count), until, weight, is_turned=is_turned, num_threads=num_threads)
    return out


def _convolution(
    num_threads: int,
    columns: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    is_transposed: bool,
    output_padding: Sequence[int],
    num_groups: int,
) -> torch.Tensor:
    """Return the convolution of columns [n, channels, tokens] with weight [out channels, channels of a group, size]."""
    if columns.dim() != 3 or is_transposed or {*stride, *dilation} != {1} or columns.dtype not in ROW_TYPES:
        raise UnfixedProduct("of another form than a causal one")
    windows = torch.nn.functional.pad(columns, (padding[0], padding[0])).unfold(2, weight.shape[2], 1)
    if weight.shape[:2] == (columns.shape[1], 1) and num_groups == columns.shape[1]:
        out = sums_of_channels(windows, weight[:, 0])
    else:
        parts = zip(windows.chunk(num_groups, 1), weight.chunk(num_groups), strict=True)
        rows = [(part.transpose(1, 2).flatten(2), matrix.flatten(1).t()) for part, matrix in parts]
        results = [multiply(part.flatten(0, 1), matrix, num_threads=num_threads) for part, matrix in rows]
        out = torch.cat([part.view(len(columns), -1, part.shape[1]) for part in results], 2).transpose(1, 2)
    return (out if bias is None else out + bias[:, None]).contiguous()


def sums_of_channels(windows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the sums [n, channels, tokens] of windows [n, channels, tokens, size] times weight [channels, size]."""
    if windows.shape[2] == 1:  # of a token's taps at once, in fewer calls
        first, *terms = (windows.float() * weight[:, None].float()).unbind(3)
    else:
        first, *terms = (windows[..., tap].float() * weight[:, tap, None].float() for tap in range(weight.shape[1]))
    for term in terms:
        first = first + term
    return first.to(windows.dtype)


_PRODUCTS: dict[str, Callable[..., torch.Tensor]] = {
    "mm": _mm,
    "addmm": _addmm,
    "bmm": _bmm,
    "baddbmm": _baddbmm,
    "_grouped_mm": _grouped,
    "convolution": _convolution,
}

"""Products of rows with the weights of groups, by the C++ core: a model's experts, all of one step in one call.

    out[i] = x[rows[i]] @ weight[group of i].T + bias[group of i]          groups one after the other, as `ends` says

A row's result depends on this row and its group's weight alone, bit by bit.
"""

import numpy as np
import numpy.typing as npt
import torch

import kvpage._C as _C
from kvpage.checks.tensors import check_plain
from kvpage.ops.args.tokens import ROW_TYPES
from kvpage.ops.cpu.operands import NO_ROWS, as_rows, place_of

NO_WEIGHT = 0, 0, 0


def grouped_linear(
    x: torch.Tensor,
    rows: npt.NDArray[np.int64],
    ends: npt.NDArray[np.int64],
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    up: torch.Tensor | None = None,
    activation: int = 0,
    is_turned: bool = False,
    num_threads: int,
) -> torch.Tensor:
    """Return the products, or with `up` activation(x @ weight.T) * (x @ up.T). Sums are in fp32, and rounded once.

    Args:
        x: [num_rows, size].
        rows: [n], which row of x each row of the result is made of.
        ends: [num_groups], ascending: where the rows of each group end. The last is n.
        weight: [num_groups, num_columns, size] in the dtype of x; or turned, [num_groups, size, num_columns].
        bias: [num_groups, num_columns], or None.
        up: As weight, not turned; None without an activation.
        activation: The number of one of linear.ACTIVATIONS; 0 without `up`.
        is_turned: Whether weights are turned.
        num_threads: How many threads may compute.

    Returns:
        [n, num_columns].

    Raises:
        ValueError: Shapes or dtypes do not fit; a row or an end is out of range.
        TypeError: An argument is of another type.
    """
    check_plain("weight", weight)
    num_groups, num_columns, size = weight.shape if not is_turned else weight.transpose(1, 2).shape
    _check(x, weight, bias, up, size, activation, is_turned)
    if bias is not None and bias.shape != (num_groups, num_columns):
        raise ValueError(f"bias must be [{num_groups}, {num_columns}], got {tuple(bias.shape)}")
    rows, ends = np.ascontiguousarray(rows, np.int64), np.ascontiguousarray(ends, np.int64)
    if len(ends) != num_groups or (ends[-1] if num_groups else 0) != len(rows):
        raise ValueError(f"ends must be those of {num_groups} groups and {len(rows)} rows, got {ends}")
    x, out = as_rows(x), x.new_empty((len(rows), num_columns))
    weight, up = _dense(weight), None if up is None else _dense(up)
    addend = None if bias is None else bias.contiguous()
    _C.grouped_linear(
        place_of(x) if x.numel() else NO_ROWS,
        (rows.ctypes.data, ends.ctypes.data),
        _place(weight),
        NO_WEIGHT if up is None else _place(up),
        0 if addend is None else addend.data_ptr(),
        place_of(out),
        (x.shape[0], num_groups, num_columns, size),
        ROW_TYPES[x.dtype],
        activation,
        is_turned,
        num_threads,
    )
    return out


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    up: torch.Tensor | None,
    size: int,
    activation: int,
    is_turned: bool,
) -> None:
    check_plain("x", x)
    if x.dtype not in ROW_TYPES or not x.is_cpu:
        raise ValueError(f"x must be of fp32, bf16 or fp16 on a CPU, got {x.dtype} on {x.device}")
    for name, part in (("weight", weight), ("bias", bias), ("up", up)):
        if part is None:
            continue
        check_plain(name, part)
        if part.dtype != x.dtype or not part.is_cpu:
            raise ValueError(f"{name} must be of {x.dtype} on a CPU, got {part.dtype} on {part.device}")
    if (up is None) != (activation == 0) or (up is not None and (is_turned or bias is not None)):
        raise ValueError(f"up must come with an activation, and without bias or turned weights, got {activation}")
    if x.dim() != 2 or x.shape[1] != size or (up is not None and up.shape != weight.shape):
        raise ValueError(f"x must be [rows, {size}] and up as weight, got {tuple(x.shape)}")


def _dense(weight: torch.Tensor) -> torch.Tensor:
    return weight if weight.stride(2) == 1 else weight.contiguous()


def _place(weight: torch.Tensor) -> tuple[int, int, int]:
    group, row, _ = weight.stride()
    return weight.data_ptr(), group * weight.element_size(), row * weight.element_size()

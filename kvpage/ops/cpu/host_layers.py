"""Products and norms of a model's layers in host memory: one look at each tensor, one native call.

    rows, weight ─┬─► of the usual form   a new tensor, by the C++ core
                  └─► all else            None, with nothing done: the caller takes its own way

A decode step of a small model calls these some ten times a layer, where a look at an attribute takes as long as a tenth
of the native call. The short way takes nothing that linear, gated_linear and rms_norm would not take.

In both, `rows` is a tensor [..., size] of no subclass, strided, in host memory, of a dtype in ROW_TYPES, not
negated and without gradients: the caller has seen to that.
"""

from typing import Any

import torch

import kvpage._C as _C
from kvpage.ops.args.tokens import ROW_TYPES
from kvpage.ops.cpu.linear import has_fast_linear
from kvpage.ops.cpu.operands import NO_ROWS

PARAMETERS = (torch.nn.Parameter, torch.Tensor)


def is_host_weight(weight: Any, dtype: torch.dtype) -> bool:
    """Return whether it is a parameter of this dtype, of no subclass, that can be read row by row.

    Sharded training takes the memory of parameters away between their uses.
    """
    return (
        type(weight) in PARAMETERS
        and weight.dtype is dtype
        and weight.is_cpu
        and weight.layout is torch.strided
        and weight.is_contiguous()
        and not weight.is_neg()
        and (weight.data_ptr() != 0 or weight.numel() == 0)
    )


def host_product(
    rows: torch.Tensor, weight: Any, bias: Any, up: Any, activation: int, num_threads: int, is_forced: bool = False
) -> torch.Tensor | None:
    """Return rows @ weight.T + bias or, with `up`, activation(rows @ weight.T) * (rows @ up.T); or None.

    Args:
        rows: See above.
        weight: Whatever a layer has as its weight: [columns, size] in the rows' dtype, if it can be taken.
        bias: [columns], or None.
        up: As weight, or None.
        activation: The number of one of ACTIVATIONS; 0 without `up`.
        num_threads: How many threads may compute.
        is_forced: Take dtypes that torch multiplies faster, too.

    Returns:
        [..., columns] in the rows' dtype, as kvpage.ops.linear and gated_linear give it; None for all unusual weights.
    """
    dtype, shape = rows.dtype, rows.shape
    if not is_host_weight(weight, dtype) or not (is_forced or has_fast_linear(dtype)):
        return None
    sizes = weight.shape
    if len(sizes) != 2 or shape[-1:] != sizes[1:] or not sizes[1]:
        return None
    if bias is not None and (not is_host_weight(bias, dtype) or bias.shape != sizes[:1]):
        return None
    if up is not None and (not is_host_weight(up, dtype) or up.shape != sizes):
        return None
    num_columns, size = sizes
    rows = rows if rows.is_contiguous() else rows.contiguous()
    out = rows.new_empty((*shape[:-1], num_columns))
    address, count, stride = rows.data_ptr(), rows.numel() // size, size * rows.element_size()
    if not address and count:  # a tensor without memory
        return None
    _C.linear(
        (address, stride),
        (weight.data_ptr(), stride),
        NO_ROWS if up is None else (up.data_ptr(), stride),
        0 if bias is None else bias.data_ptr(),
        (out.data_ptr(), num_columns * out.element_size()),
        (count, num_columns, size),
        ROW_TYPES[dtype],
        activation,
        num_threads,
    )
    return out


def host_rms_norm(
    rows: torch.Tensor,
    weight: Any,
    eps: float,
    weight_offset: float,
    rounds_before_weight: bool,
    num_threads: int,
) -> torch.Tensor | None:
    """Return kvpage.ops.rms_norm of rows as above; None for all unusual weights. Arguments are as of rms_norm."""
    dtype = rows.dtype
    if not is_host_weight(weight, dtype) or rows.shape[-1:] != weight.shape or not len(weight):
        return None
    rows = rows if rows.is_contiguous() else rows.contiguous()
    out, size = torch.empty_like(rows), len(weight)
    address, count, stride = rows.data_ptr(), rows.numel() // size, size * rows.element_size()
    if not address and count:
        return None
    _C.rms_norm(
        (address, stride),
        NO_ROWS,
        NO_ROWS,
        (out.data_ptr(), stride),
        weight.data_ptr(),
        (count, size),
        ROW_TYPES[dtype],
        eps,
        weight_offset,
        0 if rounds_before_weight else 1,
        num_threads,
    )
    return out

"""Norms, activations and rotations of a model's layers in a CUDA device's memory: one launch each.

    rows, weight ─┬─► of the usual form   new tensors, by Triton kernels
                  └─► all else            None, with nothing done: the caller takes its own way

`rows` are tensors of no subclass, strided, on one device, of a dtype in ROW_TYPES, not negated and without gradients:
the caller has seen to that.
"""

from typing import Any

import torch

from kvpage.layout.row_norm import RowNorm
from kvpage.ops.args.bound_cache import BoundCache
from kvpage.ops.args.tokens import ROW_TYPES
from kvpage.ops.cuda import rows as device_rows
from kvpage.ops.cuda.rows import _has_triton

MOST_ELEMENTS = 2**15  # of a row: a larger one would not fit into the registers of a program
PARAMETERS = (torch.nn.Parameter, torch.Tensor)


def device_linear(rows: torch.Tensor, weight: Any, bias: Any) -> torch.Tensor | None:
    """Return rows @ weight.T + bias, each row's sums in one order whatever other rows there are; None for all unusual.

    Args:
        rows: [..., size], see above.
        weight: Whatever a layer has as its weight: [columns, size] in the rows' dtype with any strides, if it can be
            taken.
        bias: [columns], or None.
    """
    if not _has_triton() or rows.dtype not in ROW_TYPES or not _is_like(weight, rows):
        return None
    if weight.dim() != 2 or rows.shape[-1:] != weight.shape[1:]:
        return None
    if bias is not None and (not _is_like(bias, rows) or bias.shape != weight.shape[:1] or not bias.is_contiguous()):
        return None
    from kvpage.kernels import linear
    from kvpage.kernels.row_grid import RowGrid

    grid = RowGrid.of(rows)
    if grid is None:
        rows = rows.contiguous()
        grid = RowGrid.of(rows)
    if grid is None or grid.size == 0:
        return None
    out = torch.empty((*rows.shape[:-1], len(weight)), dtype=rows.dtype, device=rows.device)
    with torch.cuda.device(rows.device):
        linear.linear(rows, grid, weight, bias, out)
    return out


def device_log_softmax(scores: torch.Tensor) -> torch.Tensor | None:
    """Return the logarithm of softmax of rows, each by itself in one order; None for all unusual.

    Args:
        scores: fp32 [num_rows, num_columns] on a device with kernels.
    """
    if scores.dtype != torch.float32 or scores.dim() != 2 or not _has_triton():
        return None
    from kvpage.kernels import log_softmax

    if scores.stride(1) != 1:
        scores = scores.contiguous()
    out = torch.empty(scores.shape, dtype=torch.float32, device=scores.device)
    with torch.cuda.device(scores.device):
        log_softmax.log_softmax(scores, out)
    return out


def device_rms_norm(
    rows: torch.Tensor, weight: Any, eps: float, weight_offset: float, rounds_before_weight: bool
) -> torch.Tensor | None:
    """Return kvpage.ops.rms_norm of rows on a device; None for all unusual rows and weights.

    Args:
        rows: [..., size], see above.
        weight: Whatever a layer has as its weight: [size] in the rows' dtype, if it can be taken.
        eps: As of rms_norm.
        weight_offset: As of rms_norm.
        rounds_before_weight: As of rms_norm.
    """
    if not _has_triton() or not _is_like(weight, rows) or weight.shape != rows.shape[-1:]:
        return None
    from kvpage.kernels import norm
    from kvpage.kernels.row_grid import RowGrid

    grid = RowGrid.of(rows)
    if grid is None or not 1 <= grid.size <= MOST_ELEMENTS or not weight.is_contiguous():
        return None
    out = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    with torch.cuda.device(rows.device):
        norm.rms_norm(rows, grid, weight, out, eps, weight_offset, rounds_before_weight)
    return out


def device_add_norm(
    x: torch.Tensor, residual: torch.Tensor, x_norm: RowNorm | None, sum_norm: RowNorm | None
) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Return residual + x, or residual + norm(x), and the norm of this sum; None for all unusual rows and weights.

    Args:
        x: [..., size], see above.
        residual: The same.
        x_norm: The norm of x; None to add x as it is.
        sum_norm: The norm of the sum; None for none, whose result is None.
    """
    if not _has_triton() or not _is_like(residual, x) or residual.shape != x.shape:
        return None
    weights = [norm.weight for norm in (x_norm, sum_norm) if norm is not None]
    if any(not _is_like(weight, x) or weight.shape != x.shape[-1:] for weight in weights):
        return None
    from kvpage.kernels import norm
    from kvpage.kernels.row_grid import RowGrid

    grids = RowGrid.of(x), RowGrid.of(residual)
    if grids[0] is None or grids[1] is None or not (grids[0].is_plain and grids[1].is_plain):
        return None
    if not 1 <= grids[0].size <= MOST_ELEMENTS or not all(weight.is_contiguous() for weight in weights):
        return None
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out = None if sum_norm is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    with torch.cuda.device(x.device):
        norm.add_norm(x, grids[0], residual, grids[1], x_norm, sum_norm, total, out)
    return total, out


def device_gate(gates: torch.Tensor, ups: torch.Tensor, activation: str) -> torch.Tensor | None:
    """Return activation(gates) * ups, each rounded to the dtype; None for all unusual rows.

    Args:
        gates: [..., size], see above.
        ups: The same.
        activation: "silu" or "gelu_tanh".
    """
    if not _has_triton() or not _is_like(ups, gates) or ups.shape != gates.shape:
        return None
    from kvpage.kernels import gate
    from kvpage.kernels.row_grid import RowGrid

    grids = RowGrid.of(gates), RowGrid.of(ups)
    if grids[0] is None or grids[1] is None or not (grids[0].is_plain and grids[1].is_plain):
        return None
    out = torch.empty(gates.shape, dtype=gates.dtype, device=gates.device)
    with torch.cuda.device(gates.device):
        gate.gate(gates, grids[0], ups, grids[1], out, activation)
    return out


def device_rope(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return queries and keys rotated, as views of new tensors [1, tokens, heads, size]; None for unusual ones.

    Args:
        query: [1, heads, tokens, size], see above; size is even.
        key: The same with heads of its own.
        cos: [1, tokens, size].
        sin: The same.
    """
    rows = query, key, cos, sin
    if not _has_triton() or any(not _is_like(part, query) or part.stride(-1) != 1 for part in rows):
        return None
    num_tokens, size = query.shape[2:]
    if len(query) != 1 or not 2 <= size <= MOST_ELEMENTS or key.shape[2:] != (num_tokens, size):
        return None
    if cos.shape != (1, num_tokens, size) or sin.shape != cos.shape:
        return None
    from kvpage.kernels import rope

    by_token = query[0].transpose(0, 1), key[0].transpose(0, 1)
    outs = [torch.empty(part.shape, dtype=part.dtype, device=part.device) for part in by_token]
    with torch.cuda.device(query.device):
        rope.rope(*by_token, cos[0], sin[0], *outs)
    query_out, key_out = (out.transpose(0, 1).unsqueeze(0) for out in outs)
    return query_out, key_out


def device_heads(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    norms: tuple[RowNorm, RowNorm] | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: BoundCache,
    slots: torch.Tensor,
) -> torch.Tensor | None:
    """Norm and rotate queries and keys, and write keys and values to their slots, as ops.reshape_and_cache does.

    Args:
        query: [tokens, heads, size], see above; size is even.
        key: The same with the cache's heads.
        value: The same of a size of its own.
        norms: Of queries and of keys; None for none.
        cos: [tokens, size].
        sin: The same.
        cache: Of keys and values.
        slots: int64 [tokens], as of reshape_and_cache.

    Returns:
        Queries, a new contiguous tensor. None for all unusual rows, weights and caches: nothing was written.
    """
    cache.check()
    if not _has_triton() or cache.value is None or query.dtype not in cache.row_dtypes or query.device != cache.device:
        return None
    if any(not _is_like(part, query) or part.stride(-1) != 1 for part in (query, key, value, cos, sin)):
        return None
    if not _are_heads(query, key, value, cos, sin, cache) or not _are_slots(slots, query):
        return None
    if norms is not None and not _are_of_heads(norms, query):
        return None
    if not cache.is_writable:
        cache.check_writable()
    from kvpage.kernels import heads

    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    with torch.cuda.device(query.device):
        error = device_rows._error_word(query.device)
        heads.write_heads(query, key, value, norms, cos, sin, out, cache.views, slots, cache.scales, error)
        device_rows._check_if_debugging(query.device)
    return out


def _are_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cache: BoundCache
) -> bool:
    """Return whether the shapes fit each other and the cache."""
    num_tokens, _, size = query.shape
    _, _, num_heads, most = cache.shape
    return (
        key.shape == (num_tokens, num_heads, size)
        and value.shape[:2] == key.shape[:2]
        and cos.shape == sin.shape == (num_tokens, size)
        and size % 2 == 0
        and 2 <= size <= min(most, MOST_ELEMENTS)
        and 1 <= value.shape[2] <= min(cache.value_size, MOST_ELEMENTS)
    )


def _are_slots(slots: torch.Tensor, rows: torch.Tensor) -> bool:
    is_dense = type(slots) is torch.Tensor and slots.layout is torch.strided and not slots.is_neg()
    return (
        is_dense
        and slots.dtype is torch.int64
        and slots.shape == rows.shape[:1]
        and slots.device == rows.device
        and slots.is_contiguous()
    )


def _are_of_heads(norms: tuple[RowNorm, RowNorm], rows: torch.Tensor) -> bool:
    """Return whether both norms are of the rows' size and dtype, and round alike."""
    weights = [norm.weight for norm in norms]
    fit = all(
        _is_like(weight, rows) and weight.shape == rows.shape[2:] and weight.is_contiguous() for weight in weights
    )
    return fit and norms[0].rounds_before_weight == norms[1].rounds_before_weight


def _is_like(tensor: Any, rows: torch.Tensor) -> bool:
    """Return whether it is a tensor of no subclass with the rows' dtype, in memory of their device."""
    return (
        type(tensor) in PARAMETERS
        and tensor.dtype is rows.dtype
        and tensor.device == rows.device
        and tensor.layout is torch.strided
        and not tensor.is_neg()
        and (tensor.data_ptr() != 0 or tensor.numel() == 0)
    )

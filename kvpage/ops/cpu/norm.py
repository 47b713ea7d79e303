"""The root mean square norm of rows, as models of the Llama and Gemma families compute it.

    out = x / sqrt(mean(x**2) + eps) * (weight + weight_offset)

The C++ core computes tensors on the CPU that need no gradient, in fp32, bf16 and fp16. Whatever else comes goes to the
same expression in torch (`kvpage.ops.reference`).
"""

import torch

import kvpage._C as _C
from kvpage.checks.values import as_real
from kvpage.ops import reference
from kvpage.ops.args.tokens import ROW_TYPES
from kvpage.ops.cpu.operands import as_rows, check_memory, flat, is_plain, meets, place_of, target_of, written


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    weight_offset: float = 0.0,
    rounds_before_weight: bool = True,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the rows of `x`, each divided by the root of its mean square, times the weight.

    Args:
        x: [..., size].
        weight: [size], of the same dtype.
        eps: Added to the mean square.
        weight_offset: Added to the weight: 1 for Gemma, else 0.
        rounds_before_weight: Whether the normalised numbers are rounded to the dtype before their product with the
            weight, as Llama does. Gemma computes the product in fp32, and rounds it.
        out: [..., size] to write into, which may be `x`; None for a new tensor.

    Returns:
        [..., size], `out` where given.

    Raises:
        TypeError: `x`, `weight` or another tensor is none, or `eps` or `weight_offset` is no number.
        ValueError: `weight` has another shape, or `out` another shape, dtype or device, or it requires a gradient. One
            of them has no memory for its elements.
    """
    _check_tensors(x=x, weight=weight, **({} if out is None else {"out": out}))
    _check_weight(x, weight)
    eps, weight_offset = as_real("eps", eps), as_real("weight_offset", weight_offset)
    if not _is_norm_native((x, weight)):
        check_memory(x=x, weight=weight, out=out)
        return written(reference.rms_norm(x, weight, eps, weight_offset, rounds_before_weight), out)
    if out is not None and meets(out, (weight,) if _is_same(out, x) else (x, weight)):
        return written(rms_norm(x, weight, eps, weight_offset, rounds_before_weight), out)
    out = target_of(x, x.shape[-1], out)
    results = as_rows(out)
    _normalize(as_rows(x), None, None, results, weight, eps, weight_offset, rounds_before_weight)
    return out if results.data_ptr() == out.data_ptr() else out.copy_(results.view(out.shape))


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    weight_offset: float = 0.0,
    rounds_before_weight: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of x + residual, and the sum itself, in one pass.

    Args:
        x: [..., size].
        residual: The same.
        weight: As of `rms_norm`.
        eps: As of `rms_norm`.
        weight_offset: As of `rms_norm`.
        rounds_before_weight: As of `rms_norm`.

    Returns:
        The norm and the sum, two new tensors [..., size].

    Raises:
        TypeError: `x`, `weight` or another tensor is none, or `eps` or `weight_offset` is no number.
        ValueError: `weight` or `residual` has another shape. One of them has no memory for its elements.
    """
    _check_tensors(x=x, residual=residual, weight=weight)
    _check_weight(x, weight)
    eps, weight_offset = as_real("eps", eps), as_real("weight_offset", weight_offset)
    if residual.shape != x.shape:
        raise ValueError(f"residual must be {tuple(x.shape)}, got {tuple(residual.shape)}")
    if not _is_norm_native((x, residual, weight)):
        check_memory(x=x, residual=residual, weight=weight)
        total = x + residual
        return reference.rms_norm(total, weight, eps, weight_offset, rounds_before_weight), total
    out, total = (torch.empty(x.shape, dtype=x.dtype) for _ in range(2))
    rows = as_rows(x), as_rows(residual), as_rows(total), as_rows(out)
    _normalize(*rows, weight, eps, weight_offset, rounds_before_weight)
    return out, total


def _normalize(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    total: torch.Tensor | None,
    out: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    weight_offset: float,
    rounds_before_weight: bool,
) -> None:
    weight = flat(weight)
    _C.rms_norm(
        place_of(x),
        place_of(residual),
        place_of(total),
        place_of(out),
        weight.data_ptr(),
        (x.shape[0], x.shape[1]),
        ROW_TYPES[x.dtype],
        eps,
        weight_offset,
        0 if rounds_before_weight else 1,
        torch.get_num_threads(),
    )


def _is_same(out: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether each element lies where that of `x` does: a row is read before it is written."""
    return out.data_ptr() == x.data_ptr() and out.stride() == x.stride()


def _is_norm_native(tensors: tuple[torch.Tensor, ...]) -> bool:
    return is_plain(tensors) and tensors[0].dtype in ROW_TYPES


def _check_tensors(**tensors: object) -> None:
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")


def _check_weight(x: torch.Tensor, weight: torch.Tensor) -> None:
    if x.dim() == 0 or weight.shape != x.shape[-1:]:
        raise ValueError(f"weight must be [size] for x [..., size], got {tuple(weight.shape)} for {tuple(x.shape)}")

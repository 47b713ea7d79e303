"""Products of rows with weights, by the C++ core where it is the faster one and by torch everywhere else.

    linear         x @ weight.T + bias
    gated_linear   activation(x @ gate.T) * (x @ up.T)

Weights are read where they lie, so a change of a weight is seen at once. A row's result depends on this row and on the
weights alone: it is the same, bit by bit, whatever other rows there are and however many threads.

The core takes tensors on the CPU that need no gradient, of dtypes for which `has_fast_linear` is true. Whatever
else comes goes to torch, with torch's own rounding and errors.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F

import kvpage._C as _C
from kvpage.ops.args.tokens import ROW_TYPES
from kvpage.ops.cpu.operands import as_rows, check_memory, flat, is_plain, meets, place_of, target_of, written

ACTIVATIONS: dict[str, tuple[int, Callable[[torch.Tensor], torch.Tensor]]] = {
    "silu": (1, F.silu),
    "gelu_tanh": (2, functools.partial(F.gelu, approximate="tanh")),
}
"""Of each activation: its number in csrc/linear/linear_kernel.h, and torch's function."""


@functools.cache
def has_fast_linear(dtype: torch.dtype) -> bool:
    """Return whether `linear` computes this dtype by itself on this machine's CPU.

    The instruction sets decide, not a timing. Without AVX2 torch computes. It also computes bf16 where the processor
    has AMX, and fp16 where it has AVX512_FP16. With AVX512_BF16 the core adds products of pairs of bf16 in one
    instruction, which takes subnormal numbers as zeros. An engine with the option same_bits has products in bf16 native
    on processors with AMX, too.

    Args:
        dtype: The dtype of rows and weights.

    Returns:
        Whether the C++ core is taken. False for all dtypes but fp32, bf16 and fp16.
    """
    return dtype in ROW_TYPES and _C.has_fast_linear(ROW_TYPES[dtype])


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return x @ weight.T + bias. Sums are taken in fp32, and rounded once.

    Args:
        x: [..., in_features].
        weight: [out_features, in_features], of the same dtype.
        bias: [out_features], or None.
        out: [..., out_features] to write into; None for a new tensor. Where its memory lies among that of the others,
            the result is computed apart, and copied.

    Returns:
        [..., out_features], `out` where given.

    Raises:
        TypeError: An argument is no tensor.
        ValueError: `out` is of another shape, dtype or device, requires a gradient, or two of its elements share
            memory. A tensor has no memory for its elements.
        RuntimeError: Shapes, dtypes or devices do not fit; these errors are torch's.
    """
    operands = (x, weight) if bias is None else (x, weight, bias)
    if not _is_native(operands) or not _fits(x, weight, bias):
        check_memory(x=x, weight=weight, bias=bias, out=out)
        return written(F.linear(x, weight, bias), out)
    if out is not None and meets(out, operands):
        return written(linear(x, weight, bias), out)
    out = target_of(x, weight.shape[0], out)
    rows, results = as_rows(x), as_rows(out)
    dense_weight = weight if weight.stride(1) == 1 else weight.contiguous()
    addend = None if bias is None else flat(bias)  # held until the call is over, as is the weight
    _multiply(rows, dense_weight, None, addend, results, 0)
    return out if results.data_ptr() == out.data_ptr() else out.copy_(results.view(out.shape))


def gated_linear(
    x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: str, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return activation(x @ gate.T) * (x @ up.T).

    The core keeps both products, the activation and the final product in fp32, and rounds once. torch rounds each of
    them to the dtype.

    Args:
        x: [..., in_features].
        gate: [out_features, in_features], of the same dtype.
        up: The same.
        activation: "silu" or "gelu_tanh".
        out: As of `linear`.

    Returns:
        [..., out_features], `out` where given.

    Raises:
        TypeError: An argument is no tensor.
        ValueError: There is no such activation, or as of `linear`.
        RuntimeError: As of `linear`.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    number, function = ACTIVATIONS[activation]
    if not _is_native((x, gate, up)) or not _fits(x, gate, None) or up.shape != gate.shape:
        check_memory(x=x, gate=gate, up=up, out=out)
        return written(function(F.linear(x, gate)) * F.linear(x, up), out)
    if out is not None and meets(out, (x, gate, up)):
        return written(gated_linear(x, gate, up, activation), out)
    out = target_of(x, gate.shape[0], out)
    rows, results = as_rows(x), as_rows(out)
    weights = [weight if weight.stride(1) == 1 else weight.contiguous() for weight in (gate, up)]
    _multiply(rows, weights[0], weights[1], None, results, number)
    return out if results.data_ptr() == out.data_ptr() else out.copy_(results.view(out.shape))


def _multiply(
    rows: torch.Tensor,
    weight: torch.Tensor,
    up: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    activation: int,
) -> None:
    _C.linear(
        place_of(rows),
        place_of(weight),
        place_of(up),
        0 if bias is None else bias.data_ptr(),
        place_of(out),
        (rows.shape[0], weight.shape[0], rows.shape[1]),
        ROW_TYPES[rows.dtype],
        activation,
        torch.get_num_threads(),
    )


def _is_native(tensors: tuple[torch.Tensor, ...]) -> bool:
    return is_plain(tensors) and has_fast_linear(tensors[0].dtype)


def _fits(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether the shapes are those that `linear` describes; torch also knows others."""
    return (
        x.dim() > 0
        and weight.dim() == 2
        and x.shape[-1] == weight.shape[1]
        and (bias is None or bias.shape == weight.shape[:1])
    )

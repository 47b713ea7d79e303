"""Products of rows with weights, by the C++ core where it is the faster one and by torch everywhere else.

    linear         x @ weight.T + bias
    gated_linear   activation(x @ gate.T) * (x @ up.T)

Weights are read where they lie, so a change of a weight is seen at once. A row's result depends on this row and on the
weights alone: it is the same, bit by bit, whatever other rows there are and however many threads.

The core takes tensors on the CPU that need no gradient, whose dtypes are one of those of `has_fast_linear`. Whatever
else comes goes to torch, with torch's own rounding and errors.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version

import kvpage._C as _C
from kvpage.checks.tensors import check_writable
from kvpage.ops.args.tokens import ROW_TYPES

ACTIVATIONS: dict[str, tuple[int, Callable[[torch.Tensor], torch.Tensor]]] = {
    "silu": (1, F.silu),
    "gelu_tanh": (2, functools.partial(F.gelu, approximate="tanh")),
}
"""Of each activation: its number in csrc/linear/linear_kernel.h, and torch's function."""
NO_ROWS = (0, 0)


@functools.cache
def has_fast_linear(dtype: torch.dtype) -> bool:
    """Return whether `linear` computes this dtype by itself on this machine's CPU.

    The instruction sets decide, not a timing. Without AVX2 torch computes. It also computes bf16 where the processor
    has AMX, and fp16 where it has AVX512_FP16. With AVX512_BF16 the core adds products of pairs of bf16 in one
    instruction, which takes subnormal numbers as zeros.

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
            memory.
        RuntimeError: Shapes, dtypes or devices do not fit; these errors are torch's.
    """
    given = (x, weight) if bias is None else (x, weight, bias)
    if not _is_native(given) or not _fits(x, weight, bias):
        return _written(F.linear(x, weight, bias), out)
    if out is not None and _meets(out, given):
        return _written(linear(x, weight, bias), out)
    out = _target(x, weight.shape[0], out)
    rows, results = _as_rows(x), _as_rows(out)
    held = weight if weight.stride(1) == 1 else weight.contiguous()
    addend = None if bias is None else _flat(bias)  # held until the call is over, as is the weight
    _multiply(rows, held, None, addend, results, 0)
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
        return _written(function(F.linear(x, gate)) * F.linear(x, up), out)
    if out is not None and _meets(out, (x, gate, up)):
        return _written(gated_linear(x, gate, up, activation), out)
    out = _target(x, gate.shape[0], out)
    rows, results = _as_rows(x), _as_rows(out)
    weights = [each if each.stride(1) == 1 else each.contiguous() for each in (gate, up)]
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
    item = rows.element_size()
    _C.linear(
        (rows.data_ptr(), rows.stride(0) * item),
        (weight.data_ptr(), weight.stride(0) * item),
        NO_ROWS if up is None else (up.data_ptr(), up.stride(0) * item),
        0 if bias is None else bias.data_ptr(),
        (out.data_ptr(), out.stride(0) * item),
        (rows.shape[0], weight.shape[0], rows.shape[1]),
        ROW_TYPES[rows.dtype],
        activation,
        torch.get_num_threads(),
    )


def _is_native(tensors: tuple[torch.Tensor, ...]) -> bool:
    return _is_plain(tensors) and has_fast_linear(tensors[0].dtype)


def _is_plain(tensors: tuple[torch.Tensor, ...]) -> bool:
    """Whether the core can read these: tensors in host memory, of one dtype, without gradients, not traced."""
    if _is_watched():
        return False
    wants_gradients = torch.is_grad_enabled()
    dtype = getattr(tensors[0], "dtype", None)
    for tensor in tensors:
        if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
            return False
        if not tensor.is_cpu or tensor.dtype != dtype or tensor.layout is not torch.strided or tensor.is_nested:
            return False
        if (wants_gradients and tensor.requires_grad) or tensor.is_neg() or tensor.is_conj():
            return False
        if tensor.data_ptr() == 0 and tensor.numel():
            return False
    return True


def _is_watched() -> bool:
    """Whether torch would do more with a call than compute it: trace, transform, differentiate forwards or cast it."""
    return bool(
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._get_tracing_state() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or torch.is_autocast_enabled("cpu")
    )


def _fits(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether the shapes are those that `linear` describes; torch also knows others."""
    return (
        x.dim() > 0
        and weight.dim() == 2
        and x.shape[-1] == weight.shape[1]
        and (bias is None or bias.shape == weight.shape[:1])
    )


def _result(x: torch.Tensor, num_columns: int, out: torch.Tensor | None) -> torch.Tensor:
    shape = (*x.shape[:-1], num_columns)
    if out is None:
        return x.new_empty(shape)
    check_writable("out", out)
    if out.requires_grad:
        raise ValueError("out must not require a gradient, got a tensor that does")
    if out.shape != shape or out.dtype != x.dtype or out.device != x.device:
        found = f"{tuple(out.shape)} of {out.dtype} on {out.device}"
        raise ValueError(f"out must be {shape} of {x.dtype} on {x.device}, got {found}")
    return out


def _target(x: torch.Tensor, num_columns: int, out: torch.Tensor | None) -> torch.Tensor:
    """Return the tensor that the core writes into. Autograd is told so, where it is the caller's."""
    target = _result(x, num_columns, out)
    if out is not None:
        increment_version(out)
    return target


def _meets(out: torch.Tensor, others: tuple[torch.Tensor, ...]) -> bool:
    """Whether the addresses from the first element of `out` to its last are also among another tensor's."""
    check_writable("out", out)
    begin, end = _span(out)
    return any(begin < last and first < end for first, last in map(_span, others))


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    if tensor.numel() == 0:
        return 0, 0
    reach = sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.element_size()


def _written(result: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """Return torch's result, in `out` where given."""
    return result if out is None else _result(result, result.shape[-1], out).copy_(result)


def _as_rows(x: torch.Tensor) -> torch.Tensor:
    """Return [rows, size] with each row one run of memory: a view where the strides allow it, else a copy."""
    if x.dim() != 2:
        x = x.reshape(-1, x.shape[-1]) if x.numel() else x.new_empty(x.shape[:-1].numel(), x.shape[-1])
    return x if x.stride(1) == 1 or x.shape[1] <= 1 else x.contiguous()


def _flat(vector: torch.Tensor) -> torch.Tensor:
    return vector if vector.is_contiguous() else vector.contiguous()

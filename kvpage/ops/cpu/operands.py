"""Operands of native calls on rows: which the core can read, where they lie, and where the result goes."""

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version

from kvpage.checks.shared_memory import bounds
from kvpage.checks.tensors import check_dense, check_writable
from kvpage.ops.args.dispatch_modes import is_dispatch_watched

NO_ROWS = (0, 0)
"""The place of rows that are not given."""


def is_plain(tensors: tuple[torch.Tensor, ...]) -> bool:
    """Return whether the core can read these tensors.

    Args:
        tensors: At least one.

    Returns:
        Whether all lie in host memory, are of one dtype, and need no gradient, and nothing traces this call.
    """
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
        or (torch._C._len_torch_dispatch_stack() > 0 and is_dispatch_watched())
        or torch._C._get_tracing_state() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or torch.is_autocast_enabled("cpu")
    )


def check_memory(**given: torch.Tensor | None) -> None:
    """Check tensors that torch will read: it ends the process where one has a shape and no memory.

    Args:
        given: Tensors by name, or None.

    Raises:
        ValueError: One has no memory for its elements.
    """
    if _is_watched():
        return
    for name, tensor in given.items():
        is_usual = type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter
        if tensor is not None and is_usual and tensor.layout is torch.strided and not tensor.is_nested:
            check_dense(name, tensor)


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """Return the rows of a tensor, each one run of memory.

    Args:
        x: [..., size].

    Returns:
        [rows, size]: a view where the strides allow it, else a copy.
    """
    if x.dim() != 2:
        x = x.reshape(-1, x.shape[-1]) if x.numel() else x.new_empty(x.shape[:-1].numel(), x.shape[-1])
    return x if x.stride(1) == 1 or x.shape[1] <= 1 else x.contiguous()


def flat(vector: torch.Tensor) -> torch.Tensor:
    """Return a vector [size] as one run of memory: itself, or a copy."""
    return vector if vector.is_contiguous() else vector.contiguous()


def place_of(rows: torch.Tensor | None) -> tuple[int, int]:
    """Return the address of rows [rows, size] and their stride in bytes; `NO_ROWS` for None."""
    return NO_ROWS if rows is None else (rows.data_ptr(), rows.stride(0) * rows.element_size())


def result_of(x: torch.Tensor, num_columns: int, out: torch.Tensor | None) -> torch.Tensor:
    """Return the tensor that a result goes to.

    Args:
        x: [..., size].
        num_columns: The last size of the result.
        out: [..., num_columns], or None.

    Returns:
        `out`, or a new tensor of the dtype of `x`.

    Raises:
        TypeError: `out` is no tensor.
        ValueError: `out` is of another shape, dtype or device, requires a gradient, or two of its elements share
            memory.
    """
    shape = (*x.shape[:-1], num_columns)
    if out is None:
        return x.new_empty(shape)
    check_writable("out", out)
    if out.requires_grad:
        raise ValueError("out must not require a gradient, got a tensor that does")
    if out.shape != shape or out.dtype != x.dtype or out.device != x.device:
        description = f"{tuple(out.shape)} of {out.dtype} on {out.device}"
        raise ValueError(f"out must be {shape} of {x.dtype} on {x.device}, got {description}")
    return out


def target_of(x: torch.Tensor, num_columns: int, out: torch.Tensor | None) -> torch.Tensor:
    """Return the tensor that the core writes into, and tell autograd where it is the caller's.

    Args:
        x: As of `result_of`.
        num_columns: As of `result_of`.
        out: As of `result_of`.

    Returns:
        `out`, with its version raised, or a new tensor of the dtype of `x`.

    Raises:
        TypeError: As of `result_of`.
        ValueError: As of `result_of`.
    """
    target = result_of(x, num_columns, out)
    if out is not None:
        increment_version(out)
    return target


def written(result: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """Return torch's result, in `out` where given; errors as of `result_of`."""
    return result if out is None else result_of(result, result.shape[-1], out).copy_(result)


def meets(out: torch.Tensor, others: tuple[torch.Tensor, ...]) -> bool:
    """Return whether the memory of `out` lies among that of others.

    Args:
        out: Where a result goes.
        others: Tensors that are read.

    Returns:
        Whether the addresses from its first element to its last are also among another tensor's.

    Raises:
        TypeError: `out` is no tensor.
        ValueError: Two elements of `out` share memory.
    """
    check_writable("out", out)
    begin, end = bounds(out)
    return any(begin < last and first < end for first, last in map(bounds, others))

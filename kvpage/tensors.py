"""What is asked of any tensor whose memory is read or written by its address.

Torch may see other numbers than lie there: views like `torch.imag(x.conj())` are negated or conjugated when torch reads
them, and say so in a bit of the tensor.
"""

from typing import Any

import torch


def check_plain(name: str, tensor: Any) -> None:
    """TypeError unless it is a tensor, ValueError unless the numbers that torch sees in it are those in its memory."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if _is_lazy(tensor):
        raise ValueError(f"{name} must not be a view that torch negates or conjugates")


def check_writable(name: str, tensor: Any) -> None:
    """Besides, ValueError unless no two of its elements share memory, by its strides.

    Taken from the smallest, each stride must step over all that the smaller ones reach; so it is in every tensor that
    slices, splits and transposes make.
    """
    check_plain(name, tensor)
    if tensor.is_contiguous():
        return
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride < reach:
                raise ValueError(
                    f"{name} must have memory for each of its elements, "
                    f"got shape {tuple(tensor.shape)} with strides {tensor.stride()}"
                )
            reach += stride * (size - 1)


def readable(name: str, tensor: Any) -> torch.Tensor:
    """`tensor`, or a copy that holds what torch sees in it. TypeError unless it is a tensor."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    return tensor.resolve_conj().resolve_neg() if _is_lazy(tensor) else tensor


def _is_lazy(tensor: torch.Tensor) -> bool:
    return tensor.is_neg() or tensor.is_conj()

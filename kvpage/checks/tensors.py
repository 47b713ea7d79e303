"""What is asked of any tensor whose memory is read or written by its address.

Torch may see other numbers than lie there: views like `torch.imag(x.conj())` are negated or conjugated when torch reads
them, and say so in a bit of the tensor.
"""

from collections.abc import Iterable
from typing import Any

import torch


def check_dense(name: str, tensor: Any) -> None:
    """TypeError unless it is a tensor, ValueError unless its elements lie in memory, by its strides.

    Sparse and nested tensors have none; one that a framework has off-loaded or sharded may have a shape and no memory.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.layout is not torch.strided or tensor.is_nested:
        kind = "nested" if tensor.is_nested else tensor.layout
        raise ValueError(f"{name} must be a tensor with strides, got one that is {kind}")
    if tensor.device.type == "cpu" and tensor.data_ptr() == 0 and tensor.numel():
        raise ValueError(f"{name} must have memory for its elements, got shape {tuple(tensor.shape)} and no memory")


def check_plain(name: str, tensor: Any) -> None:
    """Besides, ValueError unless the numbers that torch sees in it are those in its memory."""
    check_dense(name, tensor)
    if _is_lazy(tensor):
        raise ValueError(f"{name} must not be a view that torch negates or conjugates")


def tensor_list(name: str, tensors: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors, or one's slices. Raises what check_dense raises, and TypeError for what does not list any."""
    if isinstance(tensors, torch.Tensor):
        check_dense(name, tensors)
    listed = list(tensors)
    for index, tensor in enumerate(listed):
        check_dense(f"{name}[{index}]", tensor)
    return listed


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
    """`tensor`, or a copy that holds what torch sees in it. Raises what check_dense raises."""
    check_dense(name, tensor)
    if not _is_lazy(tensor):
        return tensor
    try:
        return tensor.resolve_conj().resolve_neg()
    except NotImplementedError as error:  # of 8-bit floats, which torch does not negate
        raise ValueError(f"{name} must not be a view that torch cannot negate, got {tensor.dtype}") from error


def _is_lazy(tensor: torch.Tensor) -> bool:
    return tensor.is_neg() or tensor.is_conj()

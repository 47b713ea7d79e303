"""Checks of tensors whose memory is read or written by its address.

Torch may see other numbers than the memory holds. Views like `torch.imag(x.conj())` are negated or conjugated when
torch reads them; a bit of the tensor says so.
"""

import numbers
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from kvpage.checks.values import as_integer, as_list

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_dense(name: str, tensor: Any) -> None:
    """Raise unless it is a tensor whose elements are in memory, by its strides.

    Sparse and nested tensors have no strides. A tensor that a framework has off-loaded or sharded may have a shape and
    no memory.

    Raises:
        TypeError: It is no tensor.
        ValueError: It has no strides or no memory.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.layout is not torch.strided or tensor.is_nested:
        kind = "nested" if tensor.is_nested else tensor.layout
        raise ValueError(f"{name} must be a tensor with strides, got one that is {kind}")
    if tensor.device.type == "cpu" and tensor.data_ptr() == 0 and tensor.numel():
        raise ValueError(f"{name} must have memory for its elements, got shape {tuple(tensor.shape)} and no memory")


def check_plain(name: str, tensor: Any) -> None:
    """Raise as check_dense does, and ValueError unless torch sees the same numbers that the memory holds."""
    check_dense(name, tensor)
    if _is_lazy(tensor):
        raise ValueError(f"{name} must not be a view that torch negates or conjugates")


def tensor_list(name: str, tensors: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors as a list; of one tensor, its slices.

    Raises:
        TypeError: They cannot be listed, or one of them is no tensor.
        ValueError: As in check_dense.
    """
    if isinstance(tensors, torch.Tensor):
        check_dense(name, tensors)
    listed = list(tensors)
    for index, tensor in enumerate(listed):
        check_dense(f"{name}[{index}]", tensor)
    return listed


def check_writable(name: str, tensor: Any) -> None:
    """Raise as check_plain does, and ValueError if two of the elements share memory, by the strides.

    Taken from the smallest, each stride must step over all that the smaller ones reach. This holds for every tensor
    made by slices, splits and transposes.
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
    """Return `tensor`, or a copy that holds the numbers that torch sees in it. Raise as check_dense does."""
    is_usual = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_nested
    if not is_usual or (tensor.is_cpu and tensor.data_ptr() == 0):  # one call for the usual tensor, not three
        check_dense(name, tensor)
    plain: torch.Tensor = tensor
    if not (plain.is_neg() or plain.is_conj()):
        return plain
    try:
        return plain.resolve_conj().resolve_neg()
    except NotImplementedError as error:  # torch does not negate 8-bit floats
        raise ValueError(f"{name} must not be a view that torch cannot negate, got {tensor.dtype}") from error


def _is_lazy(tensor: torch.Tensor) -> bool:
    return tensor.is_neg() or tensor.is_conj()


def as_numbers(name: str, tensor: Any, num_dims: int | None = None) -> torch.Tensor:
    """Return the tensor with the numbers that torch sees, in the memory of a CPU or a CUDA device.

    Args:
        name: The argument's name in errors.
        tensor: The tensor.
        num_dims: The number of dimensions that it must have; None for any.

    Raises:
        TypeError: It is no tensor.
        ValueError: It is on another device, or has another number of dimensions.
    """
    plain = readable(name, tensor)
    if plain.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name} must be on the CPU or a CUDA device, got {plain.device}")
    if num_dims is not None and plain.dim() != num_dims:
        raise ValueError(f"{name} must have {num_dims} dimensions, got shape {tuple(plain.shape)}")
    return plain


def as_floats(name: str, tensor: Any, num_dims: int | None = None) -> torch.Tensor:
    """Return the tensor as as_numbers does. Raise ValueError unless its type is a float of 16 bits or more."""
    floats = as_numbers(name, tensor, num_dims)
    if not floats.dtype.is_floating_point or floats.element_size() == 1:
        raise ValueError(f"{name} must be of a floating point type, got {floats.dtype}")
    return floats


def as_indices(name: str, tensor: Any) -> torch.Tensor:
    """Return the tensor as as_numbers does. Raise ValueError unless it is one-dimensional and holds integers."""
    indices = as_numbers(name, tensor, 1)
    if indices.dtype not in INTEGERS and indices.numel():
        raise ValueError(f"{name} must be integers, got {indices.dtype}")
    return indices


def as_selection(name: str, selection: Any, num_rows: int) -> list[int]:
    """Return the selected rows as integers of at least 0.

    Args:
        name: The argument's name in errors.
        selection: Integers, where negative ones count from the last row, or a mask with one flag a row.
        num_rows: How many rows there are.
    """
    if not isinstance(selection, torch.Tensor):
        try:
            selection = torch.as_tensor(as_list(name, selection))
        except RuntimeError as error:  # torch cannot read it
            raise TypeError(f"{name} must be integers or flags, got {type(selection).__name__}") from error
    selection = as_numbers(name, selection, 1)
    if selection.dtype != torch.bool:
        return [row + num_rows if row < 0 else row for row in as_indices(name, selection).tolist()]
    if len(selection) != num_rows:
        raise ValueError(f"{name} must be a mask of {num_rows} rows, got one of {len(selection)}")
    rows: list[int] = selection.nonzero().flatten().tolist()
    return rows


def as_bounds(name: str, bounds: torch.Tensor | Sequence[int], num_tokens: int) -> list[int]:
    """Return the bounds of requests as integers. Raise ValueError unless they ascend from 0 to `num_tokens`."""
    integers = as_indices(name, bounds).tolist() if isinstance(bounds, torch.Tensor) else as_list(name, bounds)
    integers = [as_integer(name, bound) for bound in integers]
    if not integers or integers[0] != 0 or integers[-1] != num_tokens or integers != sorted(integers):
        raise ValueError(f"{name} must ascend from 0 to {num_tokens}, got {integers}")
    return integers


def as_dim(name: str, dim: int, tensor: torch.Tensor) -> int:
    """Return the dimension, counted from the first. Raise ValueError unless the tensor has it."""
    dim = as_integer(name, dim)
    if not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(f"{name} must be a dimension of shape {tuple(tensor.shape)}, got {dim}")
    return dim % tensor.dim()


def as_ratio(name: str, ratio: float) -> float:
    """Return a number from 0 to 1 as a float. Raise ValueError for any other value."""
    if isinstance(ratio, bool) or not isinstance(ratio, numbers.Real) or not 0 <= ratio <= 1:
        raise ValueError(f"{name} must be in [0, 1], got {ratio!r}")
    return float(ratio)


def as_device(name: str, device: torch.device | str) -> torch.device:
    """Return the device. Raise ValueError unless it is a CPU, or a CUDA device of this machine."""
    parsed = parse_device(name, device)
    if parsed.type == "cuda" and (parsed.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"{name} must be a device of this machine, got {device!r}")
    return parsed


def parse_device(name: str, device: torch.device | str) -> torch.device:
    """Return the device, also one that this machine lacks. Raise ValueError unless it is a CPU or a CUDA device."""
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"{name} must be a CPU or a CUDA device, got {device!r}") from error
    if parsed.type not in ("cpu", "cuda"):
        raise ValueError(f"{name} must be a CPU or a CUDA device, got {device!r}")
    return parsed

"""Tensors and numbers that torch reads, checked: TypeError for another type, ValueError for another form."""

import numbers
from collections.abc import Sequence
from typing import Any

import torch

from kvpage.checks.sequence_args import as_integer, as_list
from kvpage.checks.tensors import readable
from kvpage.layout.config import DeviceConfig

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def as_numbers(name: str, tensor: Any, num_dims: int | None = None) -> torch.Tensor:
    """The tensor, as torch sees it. Its numbers are in the memory of a CPU or a CUDA device."""
    tensor = readable(name, tensor)
    if tensor.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name} must be on the CPU or a CUDA device, got {tensor.device}")
    if num_dims is not None and tensor.dim() != num_dims:
        raise ValueError(f"{name} must have {num_dims} dimensions, got shape {tuple(tensor.shape)}")
    return tensor


def as_floats(name: str, tensor: Any, num_dims: int | None = None) -> torch.Tensor:
    """Besides, of a floating point type that has arithmetic."""
    tensor = as_numbers(name, tensor, num_dims)
    if not tensor.dtype.is_floating_point or tensor.element_size() == 1:
        raise ValueError(f"{name} must be of a floating point type, got {tensor.dtype}")
    return tensor


def as_indices(name: str, tensor: Any) -> torch.Tensor:
    """One-dimensional, of integers."""
    tensor = as_numbers(name, tensor, 1)
    if tensor.dtype not in INTEGERS and tensor.numel():
        raise ValueError(f"{name} must be integers, got {tensor.dtype}")
    return tensor


def as_selection(name: str, selection: Any, num_rows: int) -> list[int]:
    """Rows as a tensor is indexed with: integers, negative ones from the last on, or a mask of all rows."""
    if not isinstance(selection, torch.Tensor):
        try:
            selection = torch.as_tensor(as_list(name, selection))
        except RuntimeError as error:  # torch's, of what it cannot read
            raise TypeError(f"{name} must be integers or flags, got {type(selection).__name__}") from error
    selection = as_numbers(name, selection, 1)
    if selection.dtype != torch.bool:
        return [row + num_rows if row < 0 else row for row in as_indices(name, selection).tolist()]
    if len(selection) != num_rows:
        raise ValueError(f"{name} must be a mask of {num_rows} rows, got one of {len(selection)}")
    rows: list[int] = selection.nonzero().flatten().tolist()
    return rows


def as_bounds(name: str, bounds: torch.Tensor | Sequence[int], num_tokens: int) -> list[int]:
    """Where each request begins, and the end: ascending from 0 to num_tokens."""
    found = as_indices(name, bounds).tolist() if isinstance(bounds, torch.Tensor) else as_list(name, bounds)
    found = [as_integer(name, bound) for bound in found]
    if not found or found[0] != 0 or found[-1] != num_tokens or found != sorted(found):
        raise ValueError(f"{name} must ascend from 0 to {num_tokens}, got {found}")
    return found


def as_dim(name: str, dim: int, tensor: torch.Tensor) -> int:
    """One of the tensor's dimensions, not counted from its end."""
    dim = as_integer(name, dim)
    if not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(f"{name} must be a dimension of shape {tuple(tensor.shape)}, got {dim}")
    return dim % tensor.dim()


def as_ratio(name: str, ratio: float) -> float:
    """A number from 0 to 1."""
    if isinstance(ratio, bool) or not isinstance(ratio, numbers.Real) or not 0 <= ratio <= 1:
        raise ValueError(f"{name} must be in [0, 1], got {ratio!r}")
    return float(ratio)


def as_device(name: str, device: torch.device | str) -> torch.device:
    """ValueError for what is neither a CPU nor a CUDA device that is there."""
    found = torch.device(DeviceConfig(device).device)
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"{name} must be a device of this machine, got {device!r}")
    return found

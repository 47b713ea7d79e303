"""Masks and indices of tokens, and indices that select tokens in any dimension."""

from typing import Any

import torch

from kvpage.checks.tensors import as_indices, as_numbers
from kvpage.checks.values import as_integer

MAX_DIMS = 64  # of a tensor, in torch


def create_index(num_dims: int, dim: int, index: Any) -> tuple[Any, ...]:
    """Return an index of a tensor that selects `index` in one dimension, and all of the others.

    Args:
        num_dims: dimensions of the tensor.
        dim: the dimension to index; negative ones count from the end.
        index: any index of one dimension.

    Returns:
        A tuple for `tensor[...]`.

    Raises:
        ValueError: the tensor has no such dimension.
    """
    num_dims, dim = as_integer("num_dims", num_dims), as_integer("dim", dim)
    if num_dims > MAX_DIMS:
        raise ValueError(f"num_dims must be at most {MAX_DIMS}, got {num_dims}")
    if not -num_dims <= dim < num_dims:
        raise ValueError(f"dim must be in [{-num_dims}, {num_dims}), got {dim}")
    whole: list[Any] = [slice(None)] * num_dims
    whole[dim] = index
    return tuple(whole)


def indices_to_mask(indices: torch.Tensor, size: int) -> torch.Tensor:
    """Return a mask that is True at the indices.

    Args:
        indices: int [n], in [0, size).
        size: length of the mask.

    Returns:
        bool [size], on the device of the indices.

    Raises:
        ValueError: an index is outside, or size is negative.
    """
    indices, size = as_indices("indices", indices), as_integer("size", size)
    if size < 0:
        raise ValueError(f"size must not be negative, got {size}")
    if indices.numel() and not (int(indices.min()) >= 0 and int(indices.max()) < size):
        raise ValueError(f"indices must be in [0, {size}), got {int(indices.min())} to {int(indices.max())}")
    mask = torch.zeros(size, dtype=torch.bool, device=indices.device)
    mask[indices.long()] = True
    return mask


def mask_to_indices(mask: torch.Tensor) -> torch.Tensor:
    """Return the places where a mask is not 0.

    Args:
        mask: bool or int [n].

    Returns:
        int64, ascending.

    Raises:
        ValueError: the mask is not one-dimensional, or of another dtype.
    """
    return as_mask(mask).nonzero().flatten()


def as_mask(mask: torch.Tensor) -> torch.Tensor:
    """Return a mask of bools or integers as bools. Raises ValueError unless it is one-dimensional and of these."""
    mask = as_numbers("mask", mask)
    if mask.dim() != 1 or mask.dtype.is_floating_point or mask.dtype.is_complex:
        raise ValueError(f"a mask must be [num_tokens] of bools or integers, got {mask.dtype} {list(mask.shape)}")
    return mask != 0

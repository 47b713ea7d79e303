"""Tensors of tokens in any dimension as rows of heads, for kvpage.ops, and back.

[T, heads * size]   [T, heads, size]   [heads, T, size]     ──►  rows [T, heads, size], a view if there is one
"""

import math

import torch

from kvpage import ops
from kvpage.layout.rotation import Rotation


def check_heads(tensor: torch.Tensor, token_dim: int, head_size: int) -> None:
    """Raise ValueError unless each token has whole heads, in a dimension of their own or not."""
    inner = list(tensor.movedim(token_dim, 0).shape[1:])
    if not inner or (len(inner) > 1 and inner[-1] != head_size) or math.prod(inner) % head_size:
        raise ValueError(f"k and v must hold whole heads of {head_size} a token, got shape {list(tensor.shape)}")


def as_rows(tensor: torch.Tensor, token_dim: int, head_size: int | None) -> torch.Tensor:
    """Return [num_tokens, heads, size], contiguous in the last dimension. head_size: None for the last size."""
    rows = tensor.movedim(token_dim, 0)
    size = rows.shape[-1] if head_size is None else head_size
    check_heads(tensor, token_dim, size)
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    return rows.reshape(len(rows), math.prod(rows.shape[1:]) // size, size)


def mix(
    tensor: torch.Tensor,
    token_dim: int,
    head_size: int | None,
    rotation: Rotation | None = None,
    fresh: torch.Tensor | None = None,
    fresh_rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return a new tensor of the same shape and dtype; see kvpage.ops.mix_rows."""
    if not tensor.numel():  # such as the V of MLA
        return torch.empty_like(tensor)
    rows = as_rows(tensor, token_dim, head_size)
    out = torch.empty_like(rows)
    if fresh is not None:
        fresh = as_rows(fresh.to(tensor.dtype), token_dim, head_size)
    ops.mix_rows(rows, out, rotation, fresh, fresh_rows)
    return out.reshape(tensor.movedim(token_dim, 0).shape).movedim(0, token_dim)


def mix_in_place(
    tensor: torch.Tensor,
    token_dim: int,
    head_size: int | None,
    rotation: Rotation | None = None,
    fresh: torch.Tensor | None = None,
    fresh_rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """Do the same in the tensor's own memory, and return it. Without a rotation only fresh rows are written."""
    if not tensor.numel():
        return tensor
    rows = as_rows(tensor, token_dim, head_size)
    if fresh is not None:
        fresh = as_rows(fresh.to(tensor.dtype), token_dim, head_size)
    ops.mix_rows(rows, rows, rotation, fresh, fresh_rows)
    if rows.data_ptr() != tensor.data_ptr():  # its rows could not be viewed
        tensor.copy_(rows.reshape(tensor.movedim(token_dim, 0).shape).movedim(0, token_dim))
    return tensor

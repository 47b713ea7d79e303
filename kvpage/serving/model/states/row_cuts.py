"""Cuts of a packed row: a mixer's arguments for some of its tokens, and its outputs in their places again.

packed row    [1, num_tokens, ...]
a piece       [1, tokens of the piece, ...]          neighbouring tokens of one sequence
decodes       [num_decodes, 1, ...]                  one token each of several sequences
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

Rows = slice | torch.Tensor
"""Neighbouring tokens of a packed row, or int64 [n] on its device."""


class Cut(NamedTuple):
    """Some tokens of a packed row. is_batch: they are of a sequence each."""

    rows: Rows
    is_batch: bool


def cut(value: Any, num_tokens: int, at: Cut) -> Any:
    """Return the tokens of each tensor that has one place a token, in nested containers too; all else as it is."""
    if isinstance(value, torch.Tensor):
        if value.dim() >= 2 and value.shape[:2] == (1, num_tokens):
            return _rows_of(value, at)
        return value[at.rows] if value.shape == (num_tokens,) else value
    if type(value) in (tuple, list):
        return type(value)(cut(part, num_tokens, at) for part in value)
    if type(value) is dict:
        return {name: cut(part, num_tokens, at) for name, part in value.items()}
    return value


def join(outputs: Sequence[Any], num_tokens: int, cuts: Sequence[Cut]) -> Any:
    """Return the output for the packed row, of the outputs for cuts that together are all its tokens.

    Raises ValueError for outputs that are not tensors of their tokens, tuples of such, or None.
    """
    first = outputs[0]
    if first is None:
        return None
    if type(first) in (tuple, list):
        return type(first)(join(parts, num_tokens, cuts) for parts in zip(*outputs, strict=True))
    for output, at in zip(outputs, cuts, strict=True):
        _check_output(output, num_tokens, at)
    if len(outputs) == 1 and isinstance(cuts[0].rows, slice):
        return _in_row(first, cuts[0])
    joined = first.new_empty(1, num_tokens, *first.shape[2:])
    for output, at in zip(outputs, cuts, strict=True):
        joined[:, at.rows] = _in_row(output, at)
    return joined


def _rows_of(value: torch.Tensor, at: Cut) -> torch.Tensor:
    rows = value[:, at.rows] if isinstance(at.rows, slice) else value.index_select(1, at.rows)
    return rows.transpose(0, 1) if at.is_batch else rows


def _in_row(output: torch.Tensor, at: Cut) -> torch.Tensor:
    return output.transpose(0, 1) if at.is_batch else output


def _check_output(output: Any, num_tokens: int, at: Cut) -> None:
    if not isinstance(output, torch.Tensor):
        raise ValueError(f"a mixer's output must be tensors or None, got {type(output).__name__}")
    count = len(range(num_tokens)[at.rows]) if isinstance(at.rows, slice) else len(at.rows)
    sizes = (count, 1) if at.is_batch else (1, count)
    if output.shape[:2] != sizes:
        raise ValueError(f"a mixer's output must have the sizes {list(sizes)} first, got {list(output.shape)}")

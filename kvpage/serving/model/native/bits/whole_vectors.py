"""Functions of single elements, by whole vectors: each element by the same formula, wherever it lies.

torch     [ vector | vector | . . . ]            the last elements by another formula, of other bits
here      [ vector | vector | . . . 0 0 0 0 ]    zeros behind them, that are cut off
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

WHOLE = 64
"""Elements: whole vectors of any instruction set, two of which torch takes at a time."""
_TRIED = 2 * WHOLE + 3
Function = Callable[..., torch.Tensor]


def takes_vectors_alone(function: Function, x: torch.Tensor, others: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether torch takes all of x by one formula, as does every call with rows of this size beside it."""
    if not x.is_contiguous():
        return False
    return x.shape[-1:].numel() % WHOLE == 0 or _has_equal_ends(function, x.dtype, others, tuple(kwargs.items()))


def of_elements(function: Function, x: torch.Tensor) -> torch.Tensor:
    """Return function(x), each element by the formula of whole vectors."""
    return function(x) if takes_vectors_alone(function, x, (), {}) else by_vectors(function, x, (), {})


def by_vectors(function: Function, x: torch.Tensor, others: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Return function(x, *others, **kwargs), in memory as torch lays it out."""
    num = x.numel()
    padded = x.new_zeros(-(-num // WHOLE) * WHOLE)
    padded[:num] = x.reshape(-1)
    result = function(padded, *others, **kwargs)[:num].view(x.shape)
    return result if x.is_contiguous() else torch.empty_like(x, dtype=result.dtype).copy_(result)


@functools.cache
def _has_equal_ends(function: Function, dtype: torch.dtype, others: tuple[Any, ...], kwargs: tuple[Any, ...]) -> bool:
    """Try out whether the last elements of a run have the bits that they have within it."""
    x = torch.linspace(-9.0, 9.0, _TRIED).to(dtype)
    whole = by_vectors(function, x, others, dict(kwargs))
    alone = torch.cat([function(x[at : at + 1].clone(), *others, **dict(kwargs)) for at in range(_TRIED)])
    run = function(x, *others, **dict(kwargs))
    return all(torch.equal(part.view(torch.uint8), whole.view(torch.uint8)) for part in (alone, run))

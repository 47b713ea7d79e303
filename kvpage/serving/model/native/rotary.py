"""RotaryForward: the forward of an attention's copy, which rotates queries and keys in three passes instead of six.

    out = x * cos                              x, out: [1, heads, tokens, size], two halves of each head
    first half  -= second half of x * sin      cos, sin: [1, tokens, size]
    second half += first half of x * sin

A model calls a function of its own file, by a name that nearly all share. The copy's forward is the same code, for
which this name means another function. Six passes make five new tensors of the size of x, whose first touches cost more
than the arithmetic.
"""

from collections.abc import Callable
from functools import partial
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import nn

from kvpage.serving.model.meaning import innermost, with_meaning
from kvpage.serving.model.native.trial import random_rows, relative_error

Rotate = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor] | None]
NAME = "apply_rotary_pos_emb"
MAX_ERROR = 1e-5  # of fp32 rows, relative


class RotaryForward:
    """The forward of one copy. A forward that its class gets later is called instead.

    Attributes:
        names: The names of the model's file, which may change.
        rotate: What NAME means for the copy.
    """

    def __init__(self, copy: nn.Module, own: FunctionType, rotating: "Rotating") -> None:
        self._copy, self._own, self._rotating = copy, own, MethodType(rotating.forward, copy)
        self.names, self._tried, self.rotate = rotating.names, rotating.tried, rotating.rotate

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        current: Any = type(self._copy).forward
        if current is not self._own:
            return current(self._copy, *args, **kwargs)
        return self._rotating(*args, **kwargs)

    def rotates_as_tried(self) -> bool:
        """Return whether the model's own function is the one that was tried out."""
        return self.names.get(NAME) is self._tried


class Rotating(NamedTuple):
    """A forward with another meaning of NAME. names: of its file. tried: the meaning there. rotate: the other."""

    forward: FunctionType
    names: dict[str, Any]
    tried: Callable[..., Any]
    rotate: Callable[..., Any]


class RotaryKinds:
    """The forwards of one view that rotate otherwise, by the model's own: one for each class of attention.

    Args:
        is_plain: Tells of queries whether a call has only to compute.
        rotate: Returns rotated (query, key) of (query, key, cos, sin), whose shapes fit; None for those it does not
            take.
    """

    def __init__(self, is_plain: Callable[[torch.Tensor], bool], rotate: Rotate) -> None:
        self._is_plain, self._rotate = is_plain, rotate
        self._rotating: dict[FunctionType, Rotating | None] = {}

    def forward_of(self, module: nn.Module, copy: nn.Module) -> RotaryForward | None:
        """Return a forward for the module's copy; None if the module rotates nothing, or in another way."""
        forward = type(module).forward
        if type(forward) is not FunctionType or innermost(forward, NAME) is None or "forward" in vars(module):
            return None
        if forward not in self._rotating:
            self._rotating[forward] = self.rotating_of(forward)
        rotating = self._rotating[forward]
        return None if rotating is None else RotaryForward(copy, forward, rotating)

    def rotating_of(self, forward: FunctionType) -> Rotating | None:
        """Return the same function with another meaning of NAME; None if the model's rotates in another way."""
        inner = innermost(forward, NAME)
        assert inner is not None
        rotate = inner.__globals__.get(NAME)
        if not callable(rotate) or not _rotates_halves(rotate):
            return None
        other = partial(self._rotate_both, inner.__globals__, rotate)
        rotating = with_meaning(forward, NAME, other)
        return None if rotating is None else Rotating(rotating, inner.__globals__, rotate, other)

    def _rotate_both(self, names: dict[str, Any], forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Rotate (query, key, cos, sin), if this is all that is given. names: of the model's file, which may change."""
        current = names[NAME]
        if current is forward and len(args) == 4 and not kwargs and self._is_plain(args[0]) and _fit(*args):
            both = self._rotate(*args)
            if both is not None:
                return both
        return current(*args, **kwargs)


def _rotates_halves(rotate: Callable[..., Any]) -> bool:
    """Try the model's function out."""
    query, key = random_rows(1, 3, 2, 8).transpose(1, 2), random_rows(1, 3, 1, 8).transpose(1, 2)
    angles = random_rows(2, 3, 8)
    cos, sin = angles[:1], angles[1:]
    try:
        with torch.no_grad():
            pair = rotate(query, key, cos, sin)
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):  # it takes other arguments
        return False
    if type(pair) is not tuple or len(pair) != 2:
        return False
    expected = [rotated(rows, cos.unsqueeze(1), sin.unsqueeze(1)) for rows in (query, key)]
    return all(relative_error(*rows) <= MAX_ERROR for rows in zip(pair, expected, strict=True))


def _fit(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    """Whether all four are plain, of one dtype, and cos and sin are as wide as a head."""
    for part in (key, cos, sin):
        if type(part) is not torch.Tensor or part.dtype is not query.dtype or part.layout is not torch.strided:
            return False
        if part.is_cpu is not query.is_cpu or part.is_neg():
            return False
    return (
        query.dim() == key.dim() == 4
        and cos.dim() == 3
        and cos.shape == sin.shape
        and query.shape[3] == key.shape[3] == cos.shape[2]
        and cos.shape[2] % 2 == 0
    )


def host_rope(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries and keys rotated by torch's operators. cos, sin: [1, tokens, size]."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return rotated(query, cos, sin), rotated(key, cos, sin)


def rotated(rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return the rotated rows, in memory as the rows are. cos, sin: [1, 1, tokens, size]."""
    half = rows.shape[-1] // 2
    out = rows * cos
    out[..., :half].addcmul_(rows[..., half:], sin[..., :half], value=-1)
    out[..., half:].addcmul_(rows[..., :half], sin[..., half:])
    return out

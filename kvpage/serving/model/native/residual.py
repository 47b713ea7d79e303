"""ResidualForward: the forward of a decoder layer's copy, whose sums are computed with the norms before and after.

    rows ─► first ─► attention ─► [after_attention, +, second] ─► mlp ─► [after_mlp, +, the next layer's first]
                                  one kernel                             one kernel

The norm of the next layer, or the last norm of the model, is called later, with the sum. It gets the rows that are
there if it is called with this tensor, unchanged. Which norm this is shows in the first forward.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from kvpage.layout.row_norm import RowNorm
from kvpage.serving.model.native.layer_shape import LayerShape, shape_of
from kvpage.serving.model.native.norm import is_native_norm, row_norm_of
from kvpage.serving.model.native.plain import version_of

AddNorm = Callable[
    [torch.Tensor, torch.Tensor, RowNorm | None, RowNorm | None], tuple[torch.Tensor, torch.Tensor | None] | None
]


class ResidualForward:
    """The forward of one copy. Its class's own forward computes all but plain calls, as does one that it gets later.

    Attributes:
        next_norm: The norm that was called with the last sum; None before.
    """

    def __init__(self, copy: nn.Module, shape: LayerShape, sums: "Sums") -> None:
        self._copy, self._shape, self._sums = copy, shape, sums
        self._own: Any = type(copy).forward
        self.next_norm: nn.Module | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._is_usual(args, kwargs):
            return type(self._copy).forward(self._copy, *args, **kwargs)
        shape, residual = self._shape, args[0]
        parts: dict[str, Any] = self._copy._modules
        first, after_attention, second, after_mlp = (
            None if name is None else parts[name]
            for name in (shape.first, shape.after_attention, shape.second, shape.after_mlp)
        )
        rows = residual if first is None else first(residual)
        output = parts[shape.attention](hidden_states=rows, **{**shape.defaults, **kwargs})[0]
        residual, rows = self._sums.add(output, residual, after_attention, second)
        if rows is None:
            rows = residual if second is None else second(residual)
        output = parts[shape.mlp](rows)
        residual, rows = self._sums.add(output, residual, after_mlp, self.next_norm)
        self._sums.keep(self, residual, rows)
        return residual

    def _is_usual(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return (
            len(args) == 1
            and type(self._copy).forward is self._own
            and not self._copy.training
            and self._sums.is_plain(args[0])
            and self._shape.fits(kwargs)
        )


class Sums:
    """The sums of one view. The last one of a layer is kept, with its norm, until the next norm is called.

    Args:
        is_plain: Tells whether a call has only to compute.
        compute: Returns residual + x, or residual + norm(x), and the norm of this sum, of (x, residual, norm of x, norm
            of the sum); None for rows and weights that it does not take.
    """

    def __init__(self, is_plain: Callable[[torch.Tensor], bool], compute: AddNorm) -> None:
        self.is_plain, self._compute = is_plain, compute
        self._last: tuple[ResidualForward, torch.Tensor, int] | None = None  # with its version
        self._normed: tuple[torch.Tensor, RowNorm, int] | None = None  # with the version of its weight

    def forward_of(self, module: nn.Module, copy: nn.Module) -> ResidualForward | None:
        """Return a forward for a decoder layer's copy; None for other modules."""
        norms = [name for name, part in copy._modules.items() if part is not None and is_native_norm(part)]
        shape = shape_of(module, norms) if len(norms) in (2, 4) else None
        return None if shape is None else ResidualForward(copy, shape, self)

    def add(
        self, x: torch.Tensor, residual: torch.Tensor, x_norm: nn.Module | None, sum_norm: nn.Module | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return residual + x, or residual + x_norm(x), and sum_norm of this sum; None for it if it is to be called."""
        numbers = row_norm_of(x_norm), row_norm_of(sum_norm)
        is_left_out = x_norm is not None and numbers[0] is None
        if any(numbers) and not is_left_out and type(x) is torch.Tensor and self.is_plain(x):
            both = self._compute(x, residual, *numbers)
            if both is not None:
                return both
        return residual + (x if x_norm is None else x_norm(x)), None

    def keep(self, layer: ResidualForward, total: torch.Tensor, rows: torch.Tensor | None) -> None:
        """Keep a layer's last sum, and its norm by the layer's `next_norm`, for the norm that is called next."""
        self._last = self._normed = None
        if type(total) is not torch.Tensor or total.is_inference():  # whether it changes could not be seen
            return
        self._last = layer, total, total._version
        numbers = row_norm_of(layer.next_norm)
        if rows is not None and numbers is not None:
            self._normed = rows, numbers, version_of(numbers.weight)

    def take(self, norm: nn.Module, rows: torch.Tensor, numbers: RowNorm) -> torch.Tensor | None:
        """Return the norm of these rows, if they are the last sum and it was computed for such a norm."""
        if self._last is None or self._last[1] is not rows:
            return None
        (layer, _, version), normed = self._last, self._normed
        self._last = self._normed = None
        is_next, layer.next_norm = layer.next_norm is norm, norm
        if normed is None or not is_next or rows._version != version:
            return None
        output, before, weight_version = normed
        is_same = before.weight is numbers.weight and before[1:] == numbers[1:]
        return output if is_same and version_of(numbers.weight) == weight_version else None

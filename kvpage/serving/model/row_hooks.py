"""RowHooks: from some layer on, a decoder computes only some of its rows. Its own forward does not change.

    rows            0 1 2 3 4 5 6 7          the model's forward passes these from layer to layer
    layers before   # # # # # # # #
    check layer     # # # # # # # #          begun with all rows, up to its attention, which chooses some
                    . # . . # # . #          begun again with the chosen rows
    layers after    . # . . # # . #
    a second one    . # . . # # . #          begun with those, and again with fewer
                    . . . . # . . #
    after the last  0 0 0 0 # 0 0 #          each in its place, zeros between: only chosen rows have logits

Where rows are chosen before the first layer, it sees only these.

The model's forward also gives each layer other arguments (position ids, cosines and sines, ...), with all rows. They
are narrowed before each layer.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from kvpage.serving.model.attribute_patch import AttributePatch


class RowsChosen(Exception):
    """Raised by the attention of a check layer when it has chosen rows: the layer begins again."""


def decoder_layers(model: PreTrainedModel, layer_ids: Sequence[int]) -> list[nn.Module]:
    """Return the modules that the model's forward calls in order, each with the attention of one layer.

    Raises ValueError for a model without a list of them.
    """
    for modules in model.modules():
        if isinstance(modules, nn.ModuleList) and len(modules) >= len(layer_ids):
            layers = [modules[layer] for layer in layer_ids if layer < len(modules)]
            if all(_has_attention(module, layer) for module, layer in zip(layers, layer_ids, strict=False)):
                return layers
    raise ValueError(f"blend needs a model with a list of decoder layers, {type(model).__name__} has none")


def _has_attention(module: nn.Module, layer: int) -> bool:
    return any(getattr(part, "layer_idx", None) == layer for part in module.modules())


class RowHooks:
    """Narrow one forward pass of `num_rows` rows.

    layers: the modules of all layers. check_layers: the indices of those that choose rows, ascending.
    chosen: returns the rows that were chosen last, int64, ascending, from the first RowsChosen on. Later choices are
        among earlier ones.
    is_narrow: rows are chosen already, and no layer begins with all of them.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        check_layers: Sequence[int],
        num_rows: int,
        chosen: Callable[[], torch.Tensor],
        is_narrow: bool = False,
    ) -> None:
        self._layers, self._check_layers, self._num_rows, self._chosen = layers, check_layers, num_rows, chosen
        self._is_narrow = is_narrow
        self._first = 0 if is_narrow else check_layers[0]

    def on(self) -> AbstractContextManager[None]:
        """Inside, the layers' forwards are narrowed. A view shares torch's hooks with its model, so none is used."""
        layers = enumerate(self._layers[self._first :], self._first)
        return AttributePatch(
            "forward", {layer: partial(self._forward, index, layer.forward) for index, layer in layers}
        )

    def _forward(self, index: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a layer's own forward with the rows that are chosen when it ends."""
        narrowed = self._begin_check if index in self._check_layers else self._before
        args, kwargs = narrowed(index, forward, args, kwargs)
        output = forward(*args, **kwargs)
        return self._after_last(output) if index == len(self._layers) - 1 else output

    def _begin_check(self, index: int, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        rows = torch.arange(self._num_rows)
        if self._is_narrow or index != self._first:
            rows = self._chosen().cpu()
            args, kwargs = self._before(index, forward, args, kwargs)
        try:
            forward(*args, **kwargs)
        except RowsChosen:
            left = torch.searchsorted(rows, self._chosen().cpu())
            return _narrow(args, len(rows), left), _narrow(kwargs, len(rows), left)
        raise AssertionError("the check layer has chosen no rows")

    def _before(self, index: int, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        rows = self._chosen()
        return _narrow(args, self._num_rows, rows), _narrow(kwargs, self._num_rows, rows)

    def _after_last(self, output: Any) -> Any:
        if isinstance(output, tuple):
            return (self._widen(output[0]), *output[1:])
        return self._widen(output)

    def _widen(self, hidden: torch.Tensor) -> torch.Tensor:
        wide = hidden.new_zeros(1, self._num_rows, *hidden.shape[2:])
        return wide.index_copy_(1, self._chosen().to(hidden.device), hidden)


def _narrow(value: Any, num_rows: int, rows: torch.Tensor) -> Any:
    """Select `rows` of each tensor that has all rows, [1, num_rows, ...] or [num_rows], in nested containers too."""
    if isinstance(value, torch.Tensor):
        if value.dim() >= 2 and value.shape[:2] == (1, num_rows):
            return value.index_select(1, rows.to(value.device))
        return value[rows.to(value.device)] if value.shape == (num_rows,) else value
    if type(value) in (tuple, list):
        return type(value)(_narrow(part, num_rows, rows) for part in value)
    if type(value) is dict:
        return {name: _narrow(part, num_rows, rows) for name, part in value.items()}
    return value

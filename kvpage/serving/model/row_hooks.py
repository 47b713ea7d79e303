"""RowHooks: from some layer on, a decoder computes some of its rows only. Its own forward stays what it is.

    rows            0 1 2 3 4 5 6 7          what the model's forward passes from layer to layer
    layers before   # # # # # # # #
    check layer     # # # # # # # #          begun with all of them, up to its attention, which chooses
                    . # . . # # . #          begun again with those that were chosen
    layers behind   . # . . # # . #
    a second one    . # . . # # . #          begun with those, and again with fewer
                    . . . . # . . #
    behind the last 0 0 0 0 # 0 0 #          where they were, zeros between: only chosen rows have logits

Rows that are chosen before the first layer are the only ones that it sees.

What a layer is given besides the hidden states (position ids, cosines and sines, ...) comes from the model's forward
with all rows at each layer, and is narrowed before each.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel


class RowsChosen(Exception):
    """Raised out of the attention of a check layer when it has chosen: the layer is to begin again."""


def decoder_layers(model: PreTrainedModel, layer_ids: Sequence[int]) -> list[nn.Module]:
    """The modules that the model's forward calls one after the other, each with the attention of one layer.

    ValueError if there is no list of them.
    """
    for modules in model.modules():
        if isinstance(modules, nn.ModuleList) and len(modules) >= len(layer_ids):
            layers = [modules[layer] for layer in layer_ids if layer < len(modules)]
            if all(_has_attention(one, layer) for one, layer in zip(layers, layer_ids, strict=False)):
                return layers
    raise ValueError(f"blend needs a model with a list of decoder layers, {type(model).__name__} has none")


def _has_attention(module: nn.Module, layer: int) -> bool:
    return any(getattr(part, "layer_idx", None) == layer for part in module.modules())


class RowHooks:
    """For one forward pass of all `num_rows` rows. check_layers: those that choose, ascending.

    chosen: what was chosen last, int64, ascending, once the first of them has raised RowsChosen; each time among what
        was chosen before. is_narrow: some are chosen already, and no layer begins with all rows.
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

    @contextmanager
    def on(self) -> Iterator[None]:
        """Inside, the layers' forwards are ours. torch's hooks are not used: those a view of a model has from it."""
        layers = [*self._layers[self._first :]]
        own = [vars(layer).get("forward") for layer in layers]
        for index, layer in enumerate(layers, self._first):
            vars(layer)["forward"] = partial(self._forward, index, layer.forward)
        try:
            yield
        finally:
            for layer, forward in zip(layers, own, strict=True):
                del vars(layer)["forward"]
                if forward is not None:
                    vars(layer)["forward"] = forward

    def _forward(self, index: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """In place of a layer's own: of all rows, those that are chosen when it ends."""
        narrowed = self._begin_check if index in self._check_layers else self._before
        args, kwargs = narrowed(index, forward, args, kwargs)
        output = forward(*args, **kwargs)
        return self._behind_last(output) if index == len(self._layers) - 1 else output

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

    def _behind_last(self, output: Any) -> Any:
        if isinstance(output, tuple):
            return (self._widen(output[0]), *output[1:])
        return self._widen(output)

    def _widen(self, hidden: torch.Tensor) -> torch.Tensor:
        wide = hidden.new_zeros(1, self._num_rows, *hidden.shape[2:])
        return wide.index_copy_(1, self._chosen().to(hidden.device), hidden)


def _narrow(value: Any, num_rows: int, rows: torch.Tensor) -> Any:
    """`rows` of every tensor that has all of them: [1, num_rows, ...], or [num_rows]."""
    if isinstance(value, torch.Tensor):
        if value.dim() >= 2 and value.shape[:2] == (1, num_rows):
            return value.index_select(1, rows.to(value.device))
        return value[rows.to(value.device)] if value.shape == (num_rows,) else value
    if type(value) in (tuple, list):
        return type(value)(_narrow(part, num_rows, rows) for part in value)
    if type(value) is dict:
        return {name: _narrow(part, num_rows, rows) for name, part in value.items()}
    return value

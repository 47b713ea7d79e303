"""LayerStates: the states of a cache's layer as mixers of transformers 5.19 and 5.20 read them.

cache.layers[layer].conv_states[index]     is     cache.get_conv_state(layer, index)     from 5.21 on
"""

from collections.abc import Callable
from typing import Protocol

import torch

GetState = Callable[[int, int], torch.Tensor | None]


class HasStates(Protocol):
    """A cache of states."""

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return a state of a convolution; None before the first."""

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return a recurrent state; None before the first."""


class StatesOfLayer:
    """The states of one kind of one layer, by their index."""

    def __init__(self, get: GetState, layer_idx: int) -> None:
        self._get, self._layer_idx = get, layer_idx

    def __getitem__(self, state_idx: int) -> torch.Tensor | None:
        return self._get(self._layer_idx, state_idx)


class LayerStates:
    """One layer. Its states are of one position."""

    record_past = False

    def __init__(self, cache: HasStates, layer_idx: int) -> None:
        self.conv_states = StatesOfLayer(cache.get_conv_state, layer_idx)
        self.recurrent_states = StatesOfLayer(cache.get_recurrent_state, layer_idx)


class StateLayers:
    """The layers of a cache, made as they are asked for."""

    def __init__(self, cache: HasStates) -> None:
        self._cache = cache

    def __getitem__(self, layer_idx: int) -> LayerStates:
        return LayerStates(self._cache, layer_idx)

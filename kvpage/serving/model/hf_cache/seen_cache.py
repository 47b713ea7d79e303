"""SeenCache: a cache of transformers that notes what one forward pass writes into it, and which modules do so."""

import inspect
import sys
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import Cache, DynamicCache, PretrainedConfig

from kvpage.cache.state_cache import StateKey


class SeenState(NamedTuple):
    """A state [1, *shape], and the module whose forward has written it.

    cache_name: the argument that was the cache. cache_place: its place among the positional ones, after `self`.
    """

    key: StateKey
    state: torch.Tensor
    module: nn.Module
    cache_name: str
    cache_place: int


class SeenCache(DynamicCache):
    """Keep the K and V of each `update`, and return them; note states. It is enough for one forward.

    config: of the model, where its layers keep states.
    rows: (layer, K, V) of each update. states: those that were written, in order.
    """

    def __init__(self, config: PretrainedConfig | None = None) -> None:
        super().__init__(config=config) if config is not None else super().__init__()
        self.rows: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        self.states: list[SeenState] = []

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.rows.append((layer_idx, key_states, value_states))
        return key_states, value_states

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        raise ValueError(f"layers must cache K and V alone, layer {layer_idx} has an indexer's keys too")

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        full: torch.Tensor = super().update_conv_state(conv_states, layer_idx, **_number(state_idx), **kwargs)
        self._note((layer_idx, "conv", state_idx), sys._getframe(1))
        return full

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        state: torch.Tensor = super().update_recurrent_state(
            recurrent_states, layer_idx, **_number(state_idx), **kwargs
        )
        self._note((layer_idx, "recurrent", state_idx), sys._getframe(1))
        return state

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: nothing came before."""
        return 0

    def _note(self, key: StateKey, frame: FrameType | None) -> None:
        layer, name, _ = key
        while frame is not None and not _is_forward(frame):
            frame = frame.f_back
        state = state_of(self, key)
        names = [] if frame is None else _names_of(self, frame)
        if frame is None or state is None or not names:
            raise ValueError(f"the {name} state of layer {layer} must be written by a module that is given the cache")
        self.states.append(SeenState(key, state, frame.f_locals["self"], *names[0]))


def state_of(cache: Cache, key: StateKey) -> torch.Tensor | None:
    """Return a state of a cache, [n, *shape]; None if it was never written.

    A layer of transformers 5.14 or later has several of one kind, by number, and an earlier one a tensor.
    """
    layer_idx, kind, index = key
    layer: Any = cache.layers[layer_idx]
    states = layer.conv_states if kind == "conv" else layer.recurrent_states
    state: torch.Tensor | None = states if states is None or isinstance(states, torch.Tensor) else states[index]
    return state


def _is_forward(frame: FrameType) -> bool:
    return frame.f_code.co_name == "forward" and isinstance(frame.f_locals.get("self"), nn.Module)


def _names_of(cache: DynamicCache, frame: FrameType) -> list[tuple[str, int]]:
    """Return the arguments of a call that are the cache, with their places after `self`.

    The call tells them, and not the module's signature: some decorators of transformers hide it.
    """
    call = inspect.getargvalues(frame)
    return [(name, index) for index, name in enumerate(call.args[1:]) if call.locals.get(name) is cache]


def _number(state_idx: int) -> dict[str, int]:
    """Return the argument of a method of transformers' cache, which takes one only where a layer has several states."""
    return {"state_idx": state_idx} if state_idx else {}

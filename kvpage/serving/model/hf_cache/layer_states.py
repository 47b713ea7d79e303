"""The states of one layer of transformers' cache, which versions of transformers keep in two ways.

                layer.conv_states       update_conv_state returns
before 5.14     a tensor                the columns that the layer keeps
from 5.14 on    tensors by number       the columns before, and the new ones
"""

import inspect
from typing import Any

import torch
from transformers.cache_utils import Cache

from kvpage.cache.state_cache import StateKey


def _are_numbered() -> bool:
    update: Any = getattr(Cache, "update_conv_state", None)
    return update is None or "state_idx" in inspect.signature(update).parameters


ARE_NUMBERED = _are_numbered()
"""Whether layers may have several states of one kind. Where transformers' cache has no states at all, nothing asks."""


def state_of(cache: Cache, key: StateKey) -> torch.Tensor | None:
    """Return a state of a cache, [n, *shape]; None if it was never written."""
    layer_idx, kind, index = key
    layer: Any = cache.layers[layer_idx]
    states = layer.conv_states if kind == "conv" else layer.recurrent_states
    state: torch.Tensor | None = states[index] if ARE_NUMBERED else states
    return state

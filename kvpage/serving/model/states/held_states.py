"""Mixers that hold their states in attributes, not in a cache: RecurrentGemma's recurrent blocks.

    block.conv1d_state                   [n, width, kernel - 1]      None where there is no state
    block.rg_lru.recurrent_states        [n, width], fp32

In a view, the block and its rg_lru are copies. Each call sets their attributes to the states of a piece, and then takes
what the forward has made of them. Several tokens after a state would begin the convolution anew, so such a mixer is
stepwise.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from kvpage.layout.groups import StatePart
from kvpage.serving.model.attribute_patch import AttributePatch
from kvpage.serving.model.states.mixer import StateMixer
from kvpage.serving.model.states.piece_cache import PieceCache

CACHE_NAME = "past_key_values"
UNIT, CONV, RECURRENT = "rg_lru", "conv1d_state", "recurrent_states"
NO_PLACE = 1_000  # the cache is given by name


def held_states(model: PreTrainedModel) -> dict[StateMixer, tuple[StatePart, StatePart]]:
    """Return the mixers whose states are attributes, each with its parts; empty for any other model."""
    layers = getattr(model.base_model, "layers", ())
    found = {}
    for layer_id, layer in enumerate(layers):
        for module in layer.modules():
            if _holds_states(module):
                parts = _parts(module, layer_id)
                keys = frozenset(part.key for part in parts)
                found[StateMixer(module, CACHE_NAME, NO_PLACE, keys, is_stepwise=True, holds=(UNIT,))] = parts
    return found


@contextmanager
def kept_states(model: PreTrainedModel) -> Iterator[None]:
    """Give a model's own attributes back, after forwards of the model that have set them."""
    blocks: list[Any] = [module for module in model.modules() if _holds_states(module)]
    convolutions = {block: block.conv1d_state for block in blocks}
    recurrences = {block.get_submodule(UNIT): getattr(block, UNIT).recurrent_states for block in blocks}
    with AttributePatch(CONV, convolutions), AttributePatch(RECURRENT, recurrences):
        yield


def _holds_states(module: nn.Module) -> bool:
    unit = module._modules.get(UNIT)
    return hasattr(module, CONV) and hasattr(module, "conv1d_width") and hasattr(unit, RECURRENT)


def _parts(block: Any, layer_id: int) -> tuple[StatePart, StatePart]:
    width, kernel = block.linear_x.out_features, block.conv1d_width
    return (
        StatePart(layer_id, "conv", 0, (width, kernel - 1), block.linear_x.weight.dtype),
        StatePart(layer_id, "recurrent", 0, (width,), torch.float32),
    )


def with_held_states(mixer: StateMixer, copy: Any, own: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward that takes the states of a cache, for the copy of a mixer that holds them.

    own: the copy's forward.
    """
    return partial(_compute, mixer, copy, own)


def _compute(mixer: StateMixer, block: Any, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    cache: PieceCache = kwargs.pop(CACHE_NAME)
    conv, recurrent = sorted(mixer.keys)
    unit = getattr(block, UNIT)
    before = {block: cache.get_conv_state(conv[0])}, {unit: cache.get_recurrent_state(recurrent[0])}
    with AttributePatch(CONV, before[0]), AttributePatch(RECURRENT, before[1]):
        output = own(*args, **{**kwargs, "use_cache": True})
        cache.put(conv, block.conv1d_state)
        cache.put(recurrent, unit.recurrent_states)
    return output

"""Mixers that hold their states in attributes, not in a cache: RecurrentGemma's recurrent blocks.

    block.conv1d_state                   [n, width, kernel - 1]      None where there is no state
    block.rg_lru.recurrent_states        [n, width], fp32

In a view, the block and its rg_lru are copies. Each call sets their attributes to the states of a piece, and then takes
what the forward has made of them. The recurrence goes on from its state. The convolution does so for one token alone:
for several tokens a stand-in gives it the columns before them, too.

A block with which this does not work is found when the model is loaded. It is stepwise.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from kvpage.layout.groups import StatePart
from kvpage.serving.model.attribute_patch import AttributePatch, twin_of
from kvpage.serving.model.native.trial import random_rows, relative_error
from kvpage.serving.model.states.mixer import StateMixer
from kvpage.serving.model.states.piece_cache import PieceCache

CACHE_NAME = "past_key_values"
UNIT, CONV, RECURRENT, CONVOLUTION = "rg_lru", "conv1d_state", "recurrent_states", "conv_1d"
NO_PLACE = 1_000  # the cache is given by name
NUM_FIRST, NUM_LATER = 3, 2
_CUTS = [slice(0, None)], [slice(0, NUM_FIRST), slice(NUM_FIRST, None)], [slice(0, -1), slice(-1, None)]


def held_states(model: PreTrainedModel) -> dict[StateMixer, tuple[StatePart, StatePart]]:
    """Return the mixers whose states are attributes, each with its parts; empty for any other model.

    ValueError for a block whose step of one token is not what it computes for several.
    """
    layers = getattr(model.base_model, "layers", ())
    parts_of_mixers = {}
    for layer_id, layer in enumerate(layers):
        for module in layer.modules():
            if _holds_states(module):
                parts = _parts(module, layer_id)
                keys = frozenset(part.key for part in parts)
                mixer = StateMixer(module, CACHE_NAME, NO_PLACE, keys, holds=(UNIT,))
                parts_of_mixers[replace(mixer, is_stepwise=not _goes_on(mixer, parts))] = parts
    return parts_of_mixers


def without_own_states(model: PreTrainedModel) -> PreTrainedModel:
    """Return what may compute beside the model's other callers: a twin if its modules hold states, else the model."""
    return twin_of(model) if any(_holds_states(module) for module in model.modules()) else model


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


def _compute(mixer: StateMixer, block: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    cache: PieceCache = kwargs.pop(CACHE_NAME)
    conv, recurrent = sorted(mixer.keys)
    unit = getattr(block, UNIT)
    columns = cache.get_conv_state(conv[0])
    continued = None if mixer.is_stepwise or columns is None else _Continued(getattr(block, CONVOLUTION), columns)
    hiding: nullcontext[None] | AttributePatch = nullcontext()
    if continued is not None:
        hiding = AttributePatch(CONVOLUTION, {block: continued})
    before = {block: columns}, {unit: cache.get_recurrent_state(recurrent[0])}
    with AttributePatch(CONV, before[0]), AttributePatch(RECURRENT, before[1]), hiding:
        output = forward(*args, **{**kwargs, "use_cache": True})
        cache.put(conv, block.conv1d_state if continued is None else continued.after(block, output[0].shape[1]))
        cache.put(recurrent, unit.recurrent_states)
    return output


class _Continued:
    """A causal convolution that goes on from columns before, [n, channels, kernel - 1], in one call of a block."""

    def __init__(self, convolution: nn.Module, before: torch.Tensor) -> None:
        self._convolution, self._before = convolution, before
        self._after: torch.Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        """Return what a block reads of the convolution when it has one token."""
        return getattr(self._convolution, name)

    def __call__(self, columns: torch.Tensor) -> torch.Tensor:
        """Return the outputs of `columns` [n, channels, tokens], and after them those of the padding."""
        joined = torch.cat([self._before, columns], dim=-1)
        self._after = joined[..., columns.shape[-1] :]
        output: torch.Tensor = self._convolution(joined)
        return output[..., self._before.shape[-1] :]

    def after(self, block: Any, num_tokens: int) -> torch.Tensor:
        """Return the columns after the block's call. It makes those of one token without the convolution."""
        if self._after is None and num_tokens > 1:
            raise ValueError(f"{type(block).__name__} must call {CONVOLUTION} for several tokens, it did not")
        columns: torch.Tensor = block.conv1d_state if self._after is None else self._after
        return columns


def _goes_on(mixer: StateMixer, parts: Sequence[StatePart]) -> bool:
    """Try a block out: tokens in two parts must give the output of all at once. Its forward must be its own.

    ValueError for a block whose step of one token, which is its own for all that goes on, is not part of that.
    """
    if "forward" in vars(mixer.module):
        return False
    mixer = replace(mixer, module=twin_of(mixer.module))
    weight = mixer.module.get_parameter("linear_x.weight")
    rows = random_rows(1, NUM_FIRST + NUM_LATER, weight.shape[1]).to(weight)
    try:
        whole, later, step = (_tried(mixer, parts, rows, cuts) for cuts in _CUTS)
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):  # it takes other arguments
        return False
    most = torch.finfo(weight.dtype).eps ** 0.5
    if not _are_near(step, whole, most):
        raise ValueError(f"a token after a state must be computed as a prompt's tokens are, {_name(mixer)} does not")
    return _are_near(later, whole, most)


def _name(mixer: StateMixer) -> str:
    return type(mixer.module).__name__


def _are_near(computed: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], most: float) -> bool:
    pairs = zip(computed, expected, strict=True)
    return all(relative_error(values.float().cpu(), other.float().cpu()) <= most for values, other in pairs)


def _tried(mixer: StateMixer, parts: Sequence[StatePart], rows: torch.Tensor, cuts: list[slice]) -> list[torch.Tensor]:
    """Return the outputs of the parts, and the states after them."""
    views = {part.key: torch.zeros(1, *part.shape, dtype=part.dtype, device=rows.device) for part in parts}
    forward = partial(type(mixer.module).forward, mixer.module)
    positions = torch.arange(rows.shape[1], device=rows.device)[None]
    outputs: list[torch.Tensor] = []
    with torch.no_grad():
        for cut in cuts:
            cache = PieceCache(views, slice(0, 1), has_previous=bool(outputs))
            arguments = {"position_ids": positions[:, cut], "attention_mask": None, CACHE_NAME: cache}
            outputs.append(_compute(mixer, mixer.module, forward, rows[:, cut], **arguments)[0])
    return [torch.cat(outputs, dim=1), *views.values()]

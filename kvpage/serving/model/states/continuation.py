"""Whether mixers go on from a state when they compute several tokens: some of transformers' begin from zero then.

    cache of 3 tokens ─┬─► 2 more tokens                        ─┐
                       └─► a recurrent state changed ─► 2 more  ─┴─► the same? then this mixer does not read its state

Such mixers read it for one token alone. They compute all tokens but a sequence's first portion one by one.

Before transformers 5.15 there are mixers that take any tokens after a state for one. So the 2 tokens must also give what
they give one after the other.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import torch
import transformers
from packaging.version import Version
from transformers import DynamicCache, PreTrainedModel

from kvpage.cache.state_cache import StateKey
from kvpage.serving.model.hf_cache.layer_states import state_of
from kvpage.serving.model.limits import vocab_size
from kvpage.serving.model.probe import MAX_ERROR, probe_tokens, relative_error
from kvpage.serving.model.states.mixer import StateMixer

MAY_TAKE_ONE = Version(transformers.__version__) < Version("5.15")
NUM_BEFORE, NUM_AFTER = 3, 2
MIN_CHANGE = 1e-2  # relative: what rounding alone never makes of equal numbers
MAX_ERROR_HALF = 0.05  # relative: what rounding of bf16 and fp16 makes of logits; a convolution left out makes more


class _Result(NamedTuple):
    logits: torch.Tensor
    cache: DynamicCache


def with_continuation(
    model: PreTrainedModel, cache_argument: str, mixers: Sequence[StateMixer]
) -> tuple[StateMixer, ...]:
    """Return the mixers, those of a class that does not go on from its state marked. It computes a few tokens.

    cache_argument: the argument of the model's forward that is its cache.
    """
    trial = _Trial(model, cache_argument)
    if MAY_TAKE_ONE and not trial.takes_several():
        return tuple(replace(mixer, is_stepwise=True) for mixer in mixers)
    goes_on: dict[type, bool] = {}
    for mixer in mixers:
        kind = type(mixer.module)
        if kind not in goes_on:
            goes_on[kind] = trial.goes_on(mixer)
    return tuple(replace(mixer, is_stepwise=not goes_on[type(mixer.module)]) for mixer in mixers)


class _Trial:
    """A few tokens of one model, with a cache of transformers' own."""

    def __init__(self, model: PreTrainedModel, cache_argument: str) -> None:
        self._model, self._argument = model, cache_argument
        tokens = torch.from_numpy(probe_tokens(vocab_size(model))[0]).long().to(model.device)
        self._first, self._rest = tokens[None, :NUM_BEFORE], tokens[None, NUM_BEFORE : NUM_BEFORE + NUM_AFTER]
        self._before = self._compute(self._first, DynamicCache(config=model.config)).cache

    @cached_property
    def _after(self) -> _Result:
        return self._compute(self._rest, deepcopy(self._before))

    def takes_several(self) -> bool:
        """Return whether several tokens after a state are computed as they are one by one."""
        try:
            found = self._after.logits
        except (RuntimeError, ValueError, IndexError):  # shapes of one token
            return False
        cache = deepcopy(self._before)
        expected = torch.cat([self._compute(token, cache).logits for token in self._rest.split(1, dim=1)])
        most = MAX_ERROR if expected.dtype.itemsize >= 4 else MAX_ERROR_HALF
        return relative_error(found, expected) <= most

    def goes_on(self, mixer: StateMixer) -> bool:
        """Return whether each recurrent state of a mixer matters for several tokens after it."""
        return all(self._matters(key) for key in sorted(mixer.keys) if key[1] == "recurrent")

    def _matters(self, key: StateKey) -> bool:
        cache = deepcopy(self._before)
        _written(cache, key).mul_(2).add_(100)
        changed = self._compute(self._rest, cache)
        pairs = (changed.logits, self._after.logits), (_written(cache, key), _written(self._after.cache, key))
        return any(not relative_error(*pair) <= MIN_CHANGE for pair in pairs)

    def _compute(self, tokens: torch.Tensor, cache: DynamicCache) -> _Result:
        with torch.no_grad():
            logits = self._model(input_ids=tokens, use_cache=True, **{self._argument: cache}).logits[0]
        return _Result(logits, cache)


def _written(cache: DynamicCache, key: StateKey) -> torch.Tensor:
    state = state_of(cache, key)
    assert isinstance(state, torch.Tensor), "the state was written"
    return state

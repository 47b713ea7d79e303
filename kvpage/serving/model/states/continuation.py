"""Whether mixers go on from a state when they compute several tokens: some of transformers' begin from zero then.

    cache of 3 tokens ─┬─► 2 more tokens                        ─┐
                       └─► a recurrent state changed ─► 2 more  ─┴─► the same? then this mixer does not read its state

Such mixers read it for one token alone. They compute all tokens but a sequence's first portion one by one.

Mixers of early versions of transformers are tried out in another way: see takes_several.
"""

from copy import deepcopy
from typing import NamedTuple

import torch
from transformers import DynamicCache, PreTrainedModel

from kvpage.cache.state_cache import StateKey
from kvpage.serving.model.hf_cache.seen_cache import state_of
from kvpage.serving.model.limits import vocab_size
from kvpage.serving.model.probe import probe_tokens, relative_error
from kvpage.serving.model.states.mixer import StateMixer

NUM_BEFORE, NUM_AFTER = 3, 2
MIN_CHANGE = 1e-2  # relative: what rounding alone never makes of equal numbers


class _Result(NamedTuple):
    logits: torch.Tensor
    cache: DynamicCache


class Continuation:
    """A few tokens of one model, with a cache of transformers' own.

    cache_argument: the argument of the model's forward that is its cache.
    """

    def __init__(self, model: PreTrainedModel, cache_argument: str) -> None:
        self._model, self._argument = model, cache_argument
        tokens = torch.from_numpy(probe_tokens(vocab_size(model))[0]).long().to(model.device)
        self._first, self._rest = tokens[None, :NUM_BEFORE], tokens[None, NUM_BEFORE : NUM_BEFORE + NUM_AFTER]
        self._before = self._compute(self._first, DynamicCache(config=model.config)).cache
        self._after = self._compute(self._rest, deepcopy(self._before))

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

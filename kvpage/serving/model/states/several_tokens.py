"""Whether a mixer of an early transformers computes several tokens after a state as it does one by one.

    tokens [0, 3)  ─┬─► [3, 5)            ─┐
                    └─► [3, 4)  ─► [4, 5) ─┴─► the same outputs and states?

Before transformers 5.15 there are mixers that take any tokens after a state for one, or leave out what came before.
A copy of the mixer in fp32 tells. It computes again with another state before the tokens.
"""

import torch
from transformers import PreTrainedModel

from kvpage.serving.model.states.mixer import StateMixer
from kvpage.serving.model.states.mixer_trial import (
    CANNOT_COMPUTE,
    NUM_BEFORE,
    NUM_TOKENS,
    MixerTrial,
    Shapes,
    are_same,
    given_to,
)

AT_ONCE, ONE_BY_ONE = (NUM_BEFORE, NUM_TOKENS), range(NUM_BEFORE, NUM_TOKENS + 1)


def takes_several(model: PreTrainedModel, cache_argument: str, mixer: StateMixer, shapes: Shapes) -> bool:
    """Return whether a mixer takes several tokens after a state. The model computes a few tokens.

    cache_argument: the argument of the model's forward that is its cache. shapes: of the model's states.
    """
    if "forward" in vars(mixer.module):
        return False  # somebody has replaced it
    given = given_to(model, cache_argument, mixer.module)
    try:
        trial = MixerTrial(mixer, given, shapes)
        return all(
            are_same(trial.computed(AT_ONCE, change), trial.computed(ONE_BY_ONE, change)) for change in (None, _other)
        )
    except CANNOT_COMPUTE:  # it takes one token, or no fp32
        return False


def _other(state: torch.Tensor) -> None:
    state.mul_(2).add_(100)

"""Whether a mixer of an early transformers computes several tokens after a state as it does one by one.

    tokens [0, 3)  ─┬─► [3, 5)            ─┐
                    └─► [3, 4)  ─► [4, 5) ─┴─► the same outputs and states?

Before transformers 5.15 there are mixers that take any tokens after a state for one, or leave out what came before.
A copy of the mixer in fp32 tells: its rounding hides nothing. It computes again with another state before the tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from kvpage.cache.state_cache import StateKey
from kvpage.serving.model.attribute_patch import AttributePatch
from kvpage.serving.model.limits import vocab_size
from kvpage.serving.model.native.trial import relative_error
from kvpage.serving.model.probe import probe_tokens
from kvpage.serving.model.states.mixer import StateMixer
from kvpage.serving.model.states.piece_cache import PieceCache
from kvpage.serving.model.states.row_cuts import Cut, cut

NUM_BEFORE, NUM_TOKENS = 3, 5
MAX_ERROR = 1e-5  # of fp32 numbers, relative


Shapes = Mapping[StateKey, tuple[int, ...]]
"""Of the states of one sequence."""


class _Given(NamedTuple):
    """The arguments of a mixer's call for NUM_TOKENS tokens."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def takes_several(model: PreTrainedModel, cache_argument: str, mixer: StateMixer, shapes: Shapes) -> bool:
    """Return whether a mixer takes several tokens after a state. The model computes a few tokens.

    cache_argument: the argument of the model's forward that is its cache. shapes: of the model's states.
    """
    if "forward" in vars(mixer.module):
        return False  # somebody has replaced it
    given = _floats(_given(model, cache_argument, mixer.module))
    trial = _Trial(mixer, given, shapes)
    try:
        return all(trial.is_same(change) for change in (None, _other))
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):  # it takes one token, or no fp32
        return False


def _given(model: PreTrainedModel, cache_argument: str, module: nn.Module) -> _Given:
    """Return the arguments that the model gives to one of its modules."""
    seen: list[_Given] = []
    own: Callable[..., Any] = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        seen.append(_Given(args, dict(kwargs)))
        return own(*args, **kwargs)

    tokens = torch.from_numpy(probe_tokens(vocab_size(model))[0][:NUM_TOKENS]).long().to(model.device)
    cache = {cache_argument: DynamicCache(config=model.config)}
    with torch.no_grad(), AttributePatch("forward", {module: forward}):
        model(input_ids=tokens[None], use_cache=True, **cache)
    return seen[0]


class _Trial:
    """One mixer's copy in fp32, and the arguments of a call."""

    def __init__(self, mixer: StateMixer, given: _Given, shapes: Shapes) -> None:
        self._mixer, self._given = mixer, given
        self._shapes = {key: shapes[key] for key in sorted(mixer.keys)}
        self._copy: Any = deepcopy(mixer.module).float()
        self._device = next((weight.device for weight in mixer.module.parameters()), torch.device("cpu"))

    def is_same(self, change: Callable[[torch.Tensor], None] | None) -> bool:
        """Return whether several tokens give what single ones give. change: of each recurrent state before them."""
        found = self._computed([NUM_BEFORE, NUM_TOKENS], change)
        expected = self._computed([*range(NUM_BEFORE, NUM_TOKENS + 1)], change)
        return all(relative_error(one, other) <= MAX_ERROR for one, other in zip(found, expected, strict=True))

    def _computed(self, ends: Sequence[int], change: Callable[[torch.Tensor], None] | None) -> list[torch.Tensor]:
        """Return the outputs, and the states after them."""
        views = {key: torch.zeros(1, *shape, device=self._device) for key, shape in self._shapes.items()}
        outputs = []
        for start, end in pairwise([0, *ends]):
            outputs.append(self._output(slice(start, end), PieceCache(views, slice(0, 1), has_previous=start > 0)))
            for key, view in views.items():
                if change is not None and not start and key[1] == "recurrent":
                    change(view)
        return [torch.cat(outputs, dim=1), *(view.flatten(1) for view in views.values())]

    def _output(self, tokens: slice, cache: PieceCache) -> torch.Tensor:
        args, kwargs = (cut(one, NUM_TOKENS, Cut(tokens, False)) for one in self._given)
        place = self._mixer.cache_place
        if len(args) > place:
            args = (*args[:place], cache, *args[place + 1 :])
        else:
            kwargs = {**kwargs, self._mixer.cache_name: cache}
        with torch.no_grad(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            output = self._copy.forward(*args, **kwargs)
        parts = output if isinstance(output, tuple | list) else (output,)
        return torch.cat([part.flatten(2) for part in parts if isinstance(part, torch.Tensor)], dim=-1)


def _other(state: torch.Tensor) -> None:
    state.mul_(2).add_(100)


def _floats(given: Any) -> Any:
    """Return the arguments with their numbers in fp32, and the cache left out."""
    if isinstance(given, torch.Tensor):
        return given.float() if given.is_floating_point() else given
    if isinstance(given, DynamicCache):
        return None
    if isinstance(given, _Given):
        return _Given(_floats(given.args), _floats(given.kwargs))
    if type(given) in (tuple, list):
        return type(given)(_floats(part) for part in given)
    if type(given) is dict:
        return {name: _floats(part) for name, part in given.items()}
    return given

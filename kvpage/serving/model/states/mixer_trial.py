"""MixerTrial: a copy of one mixer in fp32, which computes a few tokens in calls of some sizes, and their states.

Rounding of fp32 hides nothing that tells two ways to compute apart.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from kvpage.cache.state_cache import StateKey
from kvpage.serving.model.limits import vocab_size
from kvpage.serving.model.native.trial import relative_error
from kvpage.serving.model.probe import probe_tokens
from kvpage.serving.model.states.mixer import StateMixer
from kvpage.serving.model.states.piece_cache import PieceCache
from kvpage.serving.model.states.row_cuts import Cut, cut
from kvpage.serving.model.twin import twin_of

NUM_BEFORE, NUM_TOKENS = 3, 5
MAX_ERROR = 1e-5  # of fp32 numbers, relative
CANNOT_COMPUTE = RuntimeError, TypeError, ValueError, AttributeError, IndexError
"""What a copy raises that takes no fp32, or other arguments."""

Shapes = Mapping[StateKey, tuple[int, ...]]
"""Of the states of one sequence."""


class Given(NamedTuple):
    """The arguments of a mixer's call for NUM_TOKENS tokens."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def given_to(model: PreTrainedModel, cache_argument: str, module: nn.Module) -> Given:
    """Return the arguments that the model gives to one of its modules, in fp32. A twin of it computes a few tokens.

    cache_argument: the argument of the model's forward that is its cache.
    """
    seen: list[Given] = []
    name = next(name for name, each in model.named_modules() if each is module)
    twin = twin_of(model)
    twin.get_submodule(name).register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(Given(args, dict(kwargs))), with_kwargs=True
    )
    tokens = torch.from_numpy(probe_tokens(vocab_size(model))[0][:NUM_TOKENS]).long().to(model.device)
    cache = {cache_argument: DynamicCache(config=model.config)}
    with torch.no_grad():
        twin(input_ids=tokens[None], use_cache=True, **cache)
    given: Given = _floats(seen[0])
    return given


class MixerTrial:
    """One mixer's copy in fp32, and the arguments of a call.

    given: see given_to. shapes: of the model's states.
    """

    def __init__(self, mixer: StateMixer, given: Given, shapes: Shapes) -> None:
        self._mixer, self._given = mixer, given
        self._shapes = {key: shapes[key] for key in sorted(mixer.keys)}
        self.copy: Any = deepcopy(mixer.module).float()
        self.device = next((weight.device for weight in mixer.module.parameters()), torch.device("cpu"))

    def computed(
        self,
        ends: Sequence[int],
        change: Callable[[torch.Tensor], None] | None = None,
        forward: Callable[..., Any] | None = None,
    ) -> list[torch.Tensor]:
        """Return the outputs of calls that end at these tokens, and the states after them.

        change: of each recurrent state after the first call. forward: of single tokens after a state; None for the
        copy's own.
        """
        views = {key: torch.zeros(1, *shape, device=self.device) for key, shape in self._shapes.items()}
        outputs = []
        for start, end in pairwise([0, *ends]):
            cache = PieceCache(views, slice(0, 1), has_previous=start > 0)
            is_own = forward is None or not start or end - start > 1
            outputs.append(self._output(self.copy.forward if is_own else forward, slice(start, end), cache))
            for key, view in views.items():
                if change is not None and not start and key[1] == "recurrent":
                    change(view)
        return [torch.cat(outputs, dim=1), *(view.flatten(1) for view in views.values())]

    def _output(self, forward: Any, tokens: slice, cache: PieceCache) -> torch.Tensor:
        args, kwargs = (cut(one, NUM_TOKENS, Cut(tokens, False)) for one in self._given)
        place = self._mixer.cache_place
        if len(args) > place:
            args = (*args[:place], cache, *args[place + 1 :])
        else:
            kwargs = {**kwargs, self._mixer.cache_name: cache}
        with torch.no_grad(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            output = forward(*args, **kwargs)
        parts = output if isinstance(output, tuple | list) else (output,)
        return torch.cat([part.flatten(2) for part in parts if isinstance(part, torch.Tensor)], dim=-1)


def are_same(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], most: float = MAX_ERROR) -> bool:
    """Return whether outputs and states differ by rounding alone. most: the largest relative error of a row."""
    return all(relative_error(one, other) <= most for one, other in zip(found, expected, strict=True))


def _floats(given: Any) -> Any:
    """Return the arguments with their numbers in fp32, and the cache left out."""
    if isinstance(given, torch.Tensor):
        return given.float() if given.is_floating_point() else given
    if isinstance(given, DynamicCache):
        return None
    if isinstance(given, Given):
        return Given(_floats(given.args), _floats(given.kwargs))
    if type(given) in (tuple, list):
        return type(given)(_floats(part) for part in given)
    if type(given) is dict:
        return {name: _floats(part) for name, part in given.items()}
    return given

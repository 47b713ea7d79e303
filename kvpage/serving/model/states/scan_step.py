"""One token after a state, computed by the rule of a mixer's scan.

    scan     dt = clamp(softplus(dt + bias), *time_step_limit)          all tokens of a prompt
    step     dt = softplus(dt + bias)                                   a token that was generated

Some Mamba-2 mixers of transformers limit the time step in their scan alone. `generate` computes a prompt by the scan,
and each token of its answer by the step. So does kvpage, which also computes tokens of prompts alone: the last, after
the state that it keeps, and portions of one token. For these, the name of the step means a step within the limits.

Which mixers these are is found when a model is loaded: a copy in fp32 computes a few tokens by both rules, with its
own weights, and with biases that take the time step beyond its limits.

    tokens [0, 3)  ─┬─► [3, 5)            ─┐
                    └─► [3, 4)  ─► [4, 5) ─┴─► the same outputs and states?

Before transformers 5.15 there are mixers that take any tokens after a state for one, or leave out what came before. The
copy tells these, too. It computes again with another state before the tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from itertools import pairwise
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel, __version__

from kvpage.cache.state_cache import StateKey
from kvpage.serving.model.attribute_patch import twin_of
from kvpage.serving.model.limits import vocab_size
from kvpage.serving.model.meaning import innermost, with_meaning
from kvpage.serving.model.native.trial import relative_error
from kvpage.serving.model.probe import probe_tokens
from kvpage.serving.model.states.mixer import LIMITS, NO_LIMITS, StateMixer, limits_of
from kvpage.serving.model.states.piece_cache import PieceCache
from kvpage.serving.model.states.row_cuts import Cut, cut

NUM_BEFORE, NUM_TOKENS = 3, 5
MAX_ERROR = 1e-5  # of fp32 numbers, relative, where several tokens are one by one
CANNOT_COMPUTE = RuntimeError, TypeError, ValueError, AttributeError, IndexError
"""The errors of a copy that takes no fp32, or other arguments."""
AT_ONCE, ONE_BY_ONE = (NUM_BEFORE, NUM_TOKENS), range(NUM_BEFORE, NUM_TOKENS + 1)
NAME = "mamba2_selective_state_update"
BIASES = "dt_bias", "dt_proj.bias", "dt_proj_bias"
BEYOND = 20.0, 4.0  # how far biases go below and above: softplus(-20) is 2e-9
MAX_ERROR_OF_STEPS, MAX_ERROR_OF_KERNELS = 1e-4, 1e-2  # relative; beyond a limit, states are off by their own size
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
    name = next(name for name, part in model.named_modules() if part is module)
    twin = twin_of(model)
    twin.get_submodule(name).register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(Given(args, dict(kwargs))), with_kwargs=True
    )
    tokens = torch.from_numpy(probe_tokens(vocab_size(model))[0][:NUM_TOKENS]).long().to(model.device)
    cache = {cache_argument: DynamicCache(config=model.config)}
    with torch.no_grad():
        twin(input_ids=tokens[None], use_cache=True, **cache)
    arguments: Given = _floats(seen[0])
    return arguments


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
        args, kwargs = (cut(part, NUM_TOKENS, Cut(tokens, False)) for part in self._given)
        cache_place = self._mixer.cache_place
        if len(args) > cache_place:
            args = (*args[:cache_place], cache, *args[cache_place + 1 :])
        else:
            kwargs = {**kwargs, self._mixer.cache_name: cache}
        with torch.no_grad(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            output = forward(*args, **kwargs)
        parts = output if isinstance(output, tuple | list) else (output,)
        return torch.cat([part.flatten(2) for part in parts if isinstance(part, torch.Tensor)], dim=-1)


def are_same(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], most: float = MAX_ERROR) -> bool:
    """Return whether outputs and states differ by rounding alone. most: the largest relative error of a row."""
    return all(relative_error(value, other) <= most for value, other in zip(found, expected, strict=True))


def _floats(value: Any) -> Any:
    """Return the arguments with their numbers in fp32, and the cache left out."""
    if isinstance(value, torch.Tensor):
        return value.float() if value.is_floating_point() else value
    if isinstance(value, DynamicCache):
        return None
    if isinstance(value, Given):
        return Given(_floats(value.args), _floats(value.kwargs))
    if type(value) in (tuple, list):
        return type(value)(_floats(part) for part in value)
    if type(value) is dict:
        return {name: _floats(part) for name, part in value.items()}
    return value


def scan_step(module: Any) -> Callable[..., Any] | None:
    """Return its class's forward, which computes one token after a state by the scan's rule; None if it has no step."""
    forward, limits = type(module).forward, limits_of(module)
    inner = innermost(forward, NAME)
    update = None if inner is None else inner.__globals__.get(NAME)
    if not callable(update):
        return None
    limited = with_meaning(forward, NAME, partial(_limited, update, limits))
    return None if limited is None else MethodType(limited, module)


def steps_apart(model: PreTrainedModel, cache_argument: str, mixer: StateMixer, shapes: Shapes) -> bool:
    """Return whether a mixer computes one token after a state by another rule than it computes a prompt.

    The model computes a few tokens. cache_argument: the argument of its forward that is its cache. shapes: of its
    states. ValueError if the rules differ, and no step by the scan's rule can be made of its code.
    """
    trial, limits = _trial(model, cache_argument, mixer, shapes), limits_of(mixer.module)
    if trial is None:  # its code tells what it does
        is_apart = limits != NO_LIMITS and innermost(type(mixer.module).forward, NAME) is not None
    else:
        is_apart = not _is_scan(trial, limits, None)
    if not is_apart:
        return False
    step = None if trial is None else scan_step(trial.copy)
    if trial is None or step is None or not _is_scan(trial, limits, step):
        name = type(mixer.module).__name__
        raise ValueError(
            f"a token after a state must be computed as a prompt's tokens are, {name} of transformers {__version__} "
            f"computes it otherwise (its {LIMITS} is {limits})"
        )
    return True


def _trial(model: PreTrainedModel, cache_argument: str, mixer: StateMixer, shapes: Shapes) -> MixerTrial | None:
    """Return a trial of the mixer; None where its copy computes nothing in fp32, as with replaced forwards."""
    if not _is_copied(mixer.module):
        return None
    try:
        trial = MixerTrial(mixer, given_to(model, cache_argument, mixer.module), shapes)
        trial.computed([NUM_TOKENS])
    except CANNOT_COMPUTE:
        return None
    return trial


def _is_copied(module: nn.Module) -> bool:
    """Return whether a copy computes as the module does. A replaced forward, and those of shards, have the original."""
    is_sharded = any(hasattr(weight, "device_mesh") for weight in module.parameters())
    return not is_sharded and "forward" not in vars(module)


def _is_scan(trial: MixerTrial, limits: tuple[float, float], step: Callable[..., Any] | None) -> bool:
    """Return whether single tokens give what the scan gives: with the mixer's weights, and beyond each limit."""
    biases = [weight for name, weight in trial.copy.named_parameters() if name.endswith(BIASES)]
    copies = [bias.detach().clone() for bias in biases]
    most = limits[1] if limits[1] < NO_LIMITS[1] else 0.0
    try:
        values = (None, -BEYOND[0], most + BEYOND[1]) if biases else (None,)
        return all(_is_scan_at(trial, step, biases, value) for value in values)
    finally:
        _fill(biases, copies)


def _is_scan_at(
    trial: MixerTrial, step: Callable[..., Any] | None, biases: Sequence[torch.Tensor], value: float | None
) -> bool:
    """value: of all biases; None for their own."""
    if value is not None:
        _fill(biases, [torch.full_like(bias, value) for bias in biases])
    most = MAX_ERROR_OF_STEPS if trial.device.type == "cpu" else MAX_ERROR_OF_KERNELS
    return are_same(trial.computed(ONE_BY_ONE, forward=step), trial.computed([NUM_TOKENS]), most)


def _fill(biases: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for bias, value in zip(biases, values, strict=True):
            bias.copy_(value)


def _limited(
    update: Callable[..., Any],
    limits: tuple[float, float],
    state: torch.Tensor,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    *args: Any,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    **kwargs: Any,
) -> torch.Tensor:
    """Compute a step with the time steps [n, heads, size of a head] that a scan would take, of the same arguments."""
    steps = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    steps = (nn.functional.softplus(steps) if dt_softplus else steps).clamp(*limits)
    output: torch.Tensor = update(state, hidden_states, steps, *args, dt_bias=None, dt_softplus=False, **kwargs)
    return output


def takes_several(model: PreTrainedModel, cache_argument: str, mixer: StateMixer, shapes: Shapes) -> bool:
    """Return whether a mixer takes several tokens after a state. The model computes a few tokens.

    cache_argument: the argument of the model's forward that is its cache. shapes: of the model's states.
    """
    if not _is_copied(mixer.module):
        return False
    arguments = given_to(model, cache_argument, mixer.module)
    try:
        trial = MixerTrial(mixer, arguments, shapes)
        return all(
            are_same(trial.computed(AT_ONCE, change), trial.computed(ONE_BY_ONE, change)) for change in (None, _other)
        )
    except CANNOT_COMPUTE:  # it takes one token, or no fp32
        return False


def _other(state: torch.Tensor) -> None:
    state.mul_(2).add_(100)

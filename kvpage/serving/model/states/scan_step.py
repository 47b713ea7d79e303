"""One token after a state, computed by the rule of a mixer's scan.

    scan     dt = clamp(softplus(dt + bias), *time_step_limit)          all tokens of a prompt
    step     dt = softplus(dt + bias)                                   a token that was generated

Some Mamba-2 mixers of transformers limit the time step in their scan alone. `generate` computes a prompt by the scan,
and each token of its answer by the step. So does kvpage, which also computes tokens of prompts alone: the last, after
the state that it keeps, and portions of one token. For these, the name of the step means a step within the limits.

Which mixers these are is found when a model is loaded: a copy in fp32 computes a few tokens by both rules, with its
own weights, and with biases that take the time step beyond its limits.
"""

from collections.abc import Callable, Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, __version__

from kvpage.serving.model.meaning import innermost, with_meaning
from kvpage.serving.model.states.mixer import StateMixer
from kvpage.serving.model.states.mixer_trial import CANNOT_COMPUTE, NUM_TOKENS, MixerTrial, Shapes, are_same, given_to
from kvpage.serving.model.states.several_tokens import ONE_BY_ONE

NAME, LIMITS = "mamba2_selective_state_update", "time_step_limit"
NO_LIMITS = 0.0, float("inf")
BIASES = "dt_bias", "dt_proj.bias", "dt_proj_bias"
BEYOND = 20.0, 4.0  # how far biases go below and above: softplus(-20) is 2e-9
MAX_ERROR, MAX_ERROR_OF_KERNELS = 1e-4, 1e-2  # relative; beyond a limit, states are off by their own size


def scan_step(module: Any) -> Callable[..., Any] | None:
    """Return its class's forward, which computes one token after a state by the scan's rule; None if it has no step."""
    own, limits = type(module).forward, limits_of(module)
    inner = innermost(own, NAME)
    update = None if inner is None else inner.__globals__.get(NAME)
    if not callable(update):
        return None
    forward = with_meaning(own, NAME, partial(_limited, update, limits))
    return None if forward is None else MethodType(forward, module)


def steps_apart(model: PreTrainedModel, cache_argument: str, mixer: StateMixer, shapes: Shapes) -> bool:
    """Return whether a mixer computes one token after a state by another rule than it computes a prompt.

    The model computes a few tokens. cache_argument: the argument of its forward that is its cache. shapes: of its
    states.

    Raises:
        ValueError: It does, and no step by the scan's rule can be made of its code.
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


def limits_of(module: nn.Module) -> tuple[float, float]:
    """Return the limits of a mixer's time step; those that limit nothing where it has none."""
    limits = getattr(module, LIMITS, None)
    return NO_LIMITS if limits is None else (float(limits[0]), float(limits[1]))


def _trial(model: PreTrainedModel, cache_argument: str, mixer: StateMixer, shapes: Shapes) -> MixerTrial | None:
    """Return a trial of the mixer; None where its copy computes nothing in fp32, as with replaced forwards."""
    if "forward" in vars(mixer.module):
        return None
    try:
        trial = MixerTrial(mixer, given_to(model, cache_argument, mixer.module), shapes)
        trial.computed([NUM_TOKENS])
    except CANNOT_COMPUTE:
        return None
    return trial


def _is_scan(trial: MixerTrial, limits: tuple[float, float], step: Callable[..., Any] | None) -> bool:
    """Return whether single tokens give what the scan gives: with the mixer's weights, and beyond each limit."""
    biases = [weight for name, weight in trial.copy.named_parameters() if name.endswith(BIASES)]
    own = [bias.detach().clone() for bias in biases]
    most = limits[1] if limits[1] < NO_LIMITS[1] else 0.0
    try:
        values = (None, -BEYOND[0], most + BEYOND[1]) if biases else (None,)
        return all(_is_scan_at(trial, step, biases, value) for value in values)
    finally:
        _fill(biases, own)


def _is_scan_at(
    trial: MixerTrial, step: Callable[..., Any] | None, biases: Sequence[torch.Tensor], value: float | None
) -> bool:
    """value: of all biases; None for their own."""
    if value is not None:
        _fill(biases, [torch.full_like(bias, value) for bias in biases])
    most = MAX_ERROR if trial.device.type == "cpu" else MAX_ERROR_OF_KERNELS
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

"""Causal convolutions of mixers: each token's window by itself, by operators that give it the same bits in every batch.

    columns    [ c-3 c-2 c-1 | c0 c1 c2 ]        zeros before a prompt, or the columns that a state keeps
    windows      ╰───────────────╯ ╰── ...       a product and a sum of two numbers for each tap, in fp32

They take the place of the functions of transformers that mixers call by name.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from kvpage.checks.errors import OptionError
from kvpage.serving.model.meaning import innermost
from kvpage.serving.model.native.bits.fixed_products import sums_of_channels
from kvpage.serving.model.native.bits.whole_vectors import of_elements

ACTIVATIONS: dict[str | None, Callable[[torch.Tensor], torch.Tensor] | None] = {
    None: None,
    "silu": nn.functional.silu,
    "swish": nn.functional.silu,
    "gelu": nn.functional.gelu,
    "relu": nn.functional.relu,
}


def convolve(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> torch.Tensor:
    """Return the convolution of hidden_states [n, channels, tokens] with weight [channels, size], zeros before them."""
    _check_activation(activation)
    columns = nn.functional.pad(hidden_states.to(weight.dtype), (weight.shape[1] - 1, 0))
    return _of_windows(columns, weight, bias, activation).to(hidden_states.dtype)


def convolve_step(
    hidden_states: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> torch.Tensor:
    """Return the same after the columns of conv_state [n, channels, at least size - 1], which then keeps the last."""
    _check_activation(activation)
    columns = torch.cat([conv_state, hidden_states], dim=-1).to(weight.dtype)
    conv_state.copy_(columns[:, :, -conv_state.shape[2] :])
    last = columns[:, :, 1 - weight.shape[1] - hidden_states.shape[2] :]
    return _of_windows(last, weight, bias, activation).to(hidden_states.dtype)


def _check_activation(activation: str | None) -> None:
    if activation not in ACTIVATIONS:
        raise OptionError(f"same_bits must be False for a convolution whose activation is {activation!r}")


def _of_windows(
    columns: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> torch.Tensor:
    out = sums_of_channels(columns.unfold(2, weight.shape[1], 1), weight)
    out = out if bias is None else out + bias[:, None]
    function = ACTIVATIONS[activation]
    return out if function is None else of_elements(function, out)


CONVOLUTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "causal_conv1d_fn": convolve,
    "causal_conv1d_update": convolve_step,
}
"""By the names that mixers call them by."""


def convolution_names(forward: object) -> tuple[str, ...]:
    """Return the names of CONVOLUTIONS that a mixer's forward calls, where they mean functions with their arguments."""
    inners = {name: innermost(forward, name) for name in CONVOLUTIONS}
    return tuple(name for name, inner in inners.items() if inner and _takes_states(inner.__globals__.get(name)))


def _takes_states(function: object) -> bool:
    return callable(function) and next(iter(inspect.signature(function).parameters), "") == "hidden_states"

"""Causal convolutions of mixers: against torch's, and a token's bits alone, among others and after a state."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from kvpage.checks.errors import OptionError
from kvpage.serving.model.states.fixed.fixed_convolutions import (
    CONVOLUTIONS,
    convolution_names,
    convolve,
    convolve_step,
)

CHANNELS, SIZE, TOKENS = 13, 4, 37
DTYPES = torch.float32, torch.bfloat16, torch.float16


def causal_conv1d_fn(hidden_states: torch.Tensor) -> torch.Tensor:
    return hidden_states


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Columns of two sequences, a weight and a bias."""
    draw = torch.Generator().manual_seed(0)
    shapes = (2, CHANNELS, TOKENS), (CHANNELS, SIZE), (CHANNELS,)
    columns, weight, bias = (torch.randn(*shape, generator=draw).to(dtype) for shape in shapes)
    return columns, weight, bias


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("activation", "function"), [(None, lambda x: x), ("silu", F.silu), ("gelu", F.gelu)])
def test_a_prompt_is_convolved_as_torch_does(dtype: torch.dtype, activation: str | None, function: Callable) -> None:
    columns, weight, bias = inputs(dtype)
    product = F.conv1d(columns.double(), weight.double()[:, None], padding=SIZE - 1, groups=CHANNELS)[..., :TOKENS]
    for addend in (bias, None):
        expected = function(product if addend is None else product + addend.double()[:, None])
        found = convolve(columns, weight, addend, activation)
        torch.testing.assert_close(found.double(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_portions_and_batches_have_the_same_bits(dtype: torch.dtype) -> None:
    columns, weight, bias = inputs(dtype)
    whole = convolve(columns, weight, bias, "silu")
    state = torch.zeros(2, CHANNELS, SIZE - 1, dtype=dtype)
    steps = [convolve_step(columns[..., at : at + 1], state, weight, bias, "silu") for at in range(TOKENS)]
    assert torch.equal(torch.cat(steps, dim=2), whole)
    assert torch.equal(state, columns[..., 1 - SIZE :])
    for first, last in ((0, 1), (1, 2)):
        assert torch.equal(convolve(columns[first:last], weight, bias, "silu"), whole[first:last])


def test_a_state_may_hold_more_columns_than_a_window() -> None:
    columns, weight, bias = inputs(torch.float32)
    state = columns[..., :SIZE].clone()
    found = convolve_step(columns[..., SIZE : SIZE + 2], state, weight, bias)
    assert torch.equal(found, convolve(columns, weight, bias)[..., SIZE : SIZE + 2])
    assert torch.equal(state, columns[..., 2 : SIZE + 2])


def test_other_activations_are_refused() -> None:
    columns, weight, _ = inputs(torch.float32)
    with pytest.raises(OptionError, match="whose activation is 'tanh'"):
        convolve(columns, weight, activation="tanh")


def test_names_that_mean_other_functions_stay() -> None:
    def mixer(rows: torch.Tensor) -> torch.Tensor:
        return causal_conv1d_fn(rows)

    def another(rows: torch.Tensor) -> torch.Tensor:
        return causal_conv1d_update(rows)  # noqa: F821  # a name without a meaning

    assert convolution_names(mixer) == ("causal_conv1d_fn",)
    assert convolution_names(another) == ()
    assert set(CONVOLUTIONS) == {"causal_conv1d_fn", "causal_conv1d_update"}

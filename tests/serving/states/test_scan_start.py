"""Scans of Mamba that begin with a state: the outputs and states are those of one scan over all tokens."""

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.state_loop import Portion, StateLoop, assert_near, own_logits, random_tokens
from support.state_models import SCANNED, make_state_model

from kvpage.serving.model.states import scan_start
from kvpage.serving.model.states.mixer_forward import MixerForward
from kvpage.serving.model.states.model_states import ModelStates, are_states_served
from kvpage.serving.model.states.scan_start import SLAB, ScannedForward

HAS_SCANS = pytest.mark.skipif(not are_states_served("5.16"), reason="before 5.16 no scan is found in transformers")
CHANNELS, SIZE, NUM_ROWS = 3, 4, 2


def naive_scan(
    hidden: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, **named: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token by token, from `start` or zero: the arguments of the scans of transformers, in fp64."""
    hidden, dt, A, B, C = (one.double() for one in (hidden, dt, A, B, C))
    if named.get("delta_bias") is not None:
        dt = dt + named["delta_bias"].double()[:, None]
    if named.get("delta_softplus"):
        dt = torch.nn.functional.softplus(dt)
    state = (
        named["start"].double() if named.get("start") is not None else torch.zeros(NUM_ROWS, CHANNELS, SIZE).double()
    )
    outputs = []
    for token in range(hidden.shape[2]):
        step = dt[:, :, token, None]
        state = torch.exp(A * step) * state + step * B[:, None, :, token] * hidden[:, :, token, None]
        outputs.append((state * C[:, None, :, token]).sum(2))
    output = torch.stack(outputs, dim=2)
    z = named.get("z")
    return output if z is None else output * torch.nn.functional.silu(z.double()), state


def random_scan(num_tokens: int) -> tuple[list[torch.Tensor], torch.Tensor, dict[str, Any]]:
    """The positional arguments, a start, and z, a bias and softplus."""
    generator = torch.Generator().manual_seed(num_tokens)
    hidden, dt, z = torch.randn(3, NUM_ROWS, CHANNELS, num_tokens, generator=generator)
    B, C = torch.randn(2, NUM_ROWS, SIZE, num_tokens, generator=generator)
    A = -torch.rand(CHANNELS, SIZE, generator=generator)
    named = {"z": z, "delta_bias": torch.randn(CHANNELS, generator=generator), "delta_softplus": True}
    return [hidden, dt, A, B, C], torch.randn(NUM_ROWS, CHANNELS, SIZE, generator=generator), named


@pytest.mark.parametrize("num_tokens", [1, 2, SLAB - 1, SLAB, SLAB + 1, 2 * SLAB + 3])
@pytest.mark.parametrize("has_options", [True, False])
def test_a_scan_that_begins_with_a_state(num_tokens: int, has_options: bool) -> None:
    given, start, named = random_scan(num_tokens)
    if not has_options:
        given[1], named = given[1].abs(), {}
    found = scan_start._continued(naive_scan, start, *given, **named)
    for one, expected in zip(found, naive_scan(*given, start=start, **named), strict=True):
        torch.testing.assert_close(one, expected, rtol=1e-5, atol=1e-5)


def stepwise(kind: str) -> Iterator[MixerForward]:
    for mixer in ModelStates.of_model(make_state_model(kind)).mixers:
        yield MixerForward(mixer, mixer.module)


@HAS_SCANS
@pytest.mark.parametrize("kind", sorted(SCANNED))
def test_mixers_of_mamba_go_on_in_one_call(kind: str) -> None:
    assert all(forward.mixer.is_stepwise and not forward.is_stepwise for forward in stepwise(kind))


def test_other_mixers_have_no_scan() -> None:
    for kind in ("recurrent_gemma", "mamba2"):
        mixers = ModelStates.of_model(make_state_model(kind)).mixers
        assert all(ScannedForward.of(mixer, mixer.module) is None for mixer in mixers)


@HAS_SCANS
def test_a_scan_of_another_result_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    mixer = ModelStates.of_model(make_state_model("mamba")).mixers[0]
    meanings = inspect.unwrap(type(mixer.module).forward).__globals__
    scan = meanings[scan_start.NAME]

    def squared(*args: Any, **kwargs: Any) -> Any:
        output, state = scan(*args, **kwargs)
        return output, state * state

    for other in (squared, lambda hidden: hidden, None):
        with monkeypatch.context() as patch:
            patch.setitem(meanings, scan_start.NAME, other)
            assert ScannedForward.of(mixer, mixer.module) is None


def test_a_replaced_forward_computes_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (tokens,) = make_state_model("mamba"), random_tokens(9)
    loop, counts = StateLoop(model, [tokens], num_slots=2), []
    mixer_class = type(model.backbone.layers[0].mixer)
    own = mixer_class.forward

    def counted(module: torch.nn.Module, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        counts.append(hidden_states.shape[1])
        return own(module, hidden_states, *args, **kwargs)

    expected = own_logits(model, tokens)
    monkeypatch.setattr(mixer_class, "forward", counted)
    found = [loop.step([Portion(0, start, end, 1)])[0] for start, end in ((0, 4), (4, 9))]
    assert_near(torch.cat(found), expected)
    num_layers = len(model.backbone.layers)
    assert counts == [4] * num_layers + [1] * 5 * num_layers

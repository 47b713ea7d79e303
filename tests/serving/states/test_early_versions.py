"""States as early versions of transformers keep them, and mixers that compute as theirs. It runs with any version."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.state_models import make_state_model

from kvpage import CacheConfig
from kvpage.cache.state_cache import StateCache
from kvpage.layout.groups import StateLayout, StatePart
from kvpage.serving import Engine, EngineConfig
from kvpage.serving.model.states import model_states, piece_cache
from kvpage.serving.model.states.model_states import ModelStates, are_states_served
from kvpage.serving.model.states.piece_cache import PieceCache

CONFIG = EngineConfig(CacheConfig(block_size=4, num_gpu_blocks=16))
LAYOUT = StateLayout.of_parts(
    [StatePart(0, "conv", 0, (3, 4), torch.float32), StatePart(0, "recurrent", 0, (2, 2), torch.float32)]
)


def last_token_alone(own: Callable[..., Any], module: Any, rows: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Take several tokens after a state for one, as short convolutions did."""
    return own(module, rows[:, -1:], *args, **kwargs).expand_as(rows)


def nothing(*args: Any, **kwargs: Any) -> Any:
    """Refuse several tokens after a state."""
    raise IndexError("index 1 is out of bounds for dimension 2 with size 1")


def with_forward(monkeypatch: pytest.MonkeyPatch, module: Any, several: Callable[..., Any]) -> None:
    """Let the module's class compute several tokens after a state in another way."""
    own = type(module).forward

    def forward(module: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        caches = [one for one in (*args, *kwargs.values()) if hasattr(one, "has_previous_state")]
        goes_on = any(cache.has_previous_state(module.layer_idx) for cache in caches)
        if goes_on and hidden_states.shape[1] > 1:
            return several(own, module, hidden_states, *args, **kwargs)
        return own(module, hidden_states, *args, **kwargs)

    monkeypatch.setattr(type(module), "forward", forward)


def found_stepwise(model: Any) -> set[bool]:
    return {mixer.is_stepwise for mixer in ModelStates.of_model(model).mixers}


@pytest.mark.parametrize(("kind", "is_stepwise"), [("qwen3_next", False), ("zaya", False), ("mamba", True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mixers_are_tried_out(
    monkeypatch: pytest.MonkeyPatch, kind: str, is_stepwise: bool, dtype: torch.dtype
) -> None:
    if not is_stepwise and not are_states_served("5.15"):
        pytest.skip("earlier mixers may be of either kind")
    monkeypatch.setattr(model_states, "IS_EARLY", True)
    assert found_stepwise(make_state_model(kind).to(dtype)) == {is_stepwise}


@pytest.mark.parametrize("several", [last_token_alone, nothing])
def test_mixers_that_take_one_token_are_found(monkeypatch: pytest.MonkeyPatch, several: Callable[..., Any]) -> None:
    model = make_state_model("lfm2")
    monkeypatch.setattr(model_states, "IS_EARLY", True)
    if are_states_served("5.15"):
        assert found_stepwise(model) == {False}
    with_forward(monkeypatch, model.model.layers[0].conv, several)
    assert found_stepwise(model) == {True}


def test_a_replaced_forward_is_not_tried_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_state_model("lfm2")
    monkeypatch.setattr(model_states, "IS_EARLY", True)
    convolution = model.model.layers[0].conv
    convolution.forward = type(convolution).forward.__get__(convolution)
    assert found_stepwise(model) == {True}


def test_a_decorator_may_hide_the_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_state_model("lfm2")
    expected = ModelStates.of_model(model).mixers[0]
    own = type(expected.module).forward
    monkeypatch.setattr(type(expected.module), "forward", lambda *args, **kwargs: own(*args, **kwargs))
    found = ModelStates.of_model(model).mixers[0]
    assert (found.cache_name, found.cache_place) == (expected.cache_name, expected.cache_place)


@pytest.mark.parametrize("slots", [slice(1, 3), torch.tensor([3, 0])], ids=["neighbours", "gathered"])
def test_one_state_a_layer(monkeypatch: pytest.MonkeyPatch, slots: slice | torch.Tensor) -> None:
    """As before transformers 5.14."""
    monkeypatch.setattr(piece_cache, "ARE_NUMBERED", False)
    first = PieceCache(StateCache(LAYOUT, 4).views, slots, has_previous=False)
    assert first.layers[0].conv_states is first.layers[0].recurrent_states is None
    columns, recurrent = torch.randn(2, 3, 4), torch.randn(2, 2, 2)
    kept = first.update_conv_state(columns, 0), first.update_recurrent_state(recurrent, 0)
    assert torch.equal(kept[0], columns) and torch.equal(kept[1], recurrent)
    new = torch.randn(2, 3, 1)
    kept = first.update_conv_state(new, 0), first.layers[0].recurrent_states
    assert torch.equal(kept[0], torch.cat([columns[..., 1:], new], dim=-1)) and torch.equal(kept[1], recurrent)
    assert torch.equal(first.layers[0].conv_states, kept[0]) and first.layers[0].device.type == "cpu"


def test_states_that_are_returned_can_be_viewed() -> None:
    cache = PieceCache(StateCache(LAYOUT, 4).views, slice(0, 3), has_previous=False)
    recurrent = torch.randn(3, 2, 2)
    assert torch.equal(cache.update_recurrent_state(recurrent, 0).view(-1), recurrent.view(-1))


def test_whether_the_computing_layer_has_a_state() -> None:
    cache = PieceCache(StateCache(LAYOUT, 4).views, slice(0, 1), has_previous=False)
    cache.update_conv_state(torch.randn(1, 3, 2), 0)
    assert not cache.has_previous_state()
    cache.begin({(0, "conv", 0)})
    assert cache.has_previous_state()
    cache.begin({(1, "conv", 0)})
    assert not cache.has_previous_state()


@pytest.mark.parametrize("error", [AttributeError("no attribute 'conv_states_q'"), RuntimeError("of other sizes")])
def test_a_model_that_reads_another_cache_is_refused(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    model = make_state_model("lfm2")

    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr(type(model.model.layers[0].conv), "forward", fail)
    with pytest.raises(ValueError, match=f"model must take a cache of kvpage's, Lfm2ForCausalLM says: {error}"):
        Engine.from_model(model, CONFIG)


def test_layers_that_transformers_cache_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(**kwargs: Any) -> None:
        raise KeyError("mlp")

    model = make_state_model("lfm2")
    monkeypatch.setattr(model_states, "DynamicCache", unknown)
    with pytest.raises(ValueError, match="layers must be of types that transformers' cache has, Lfm2Config has 'mlp'"):
        Engine.from_model(model, CONFIG)

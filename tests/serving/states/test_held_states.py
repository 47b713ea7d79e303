"""Blocks of RecurrentGemma, which hold their states: a portion after the first is one call, and exact."""

import types
from typing import Any

import pytest
import torch
from support.state_loop import Portion, StateLoop, assert_near, own_logits, random_tokens
from support.state_models import make_state_model

from kvpage.serving.model.states.model_states import ModelStates

PORTIONS = Portion(0, 0, 4, 1), Portion(0, 4, 5, 1), Portion(0, 5, 12, 1, ((7, 0), (8, 2)))


@pytest.fixture
def model() -> Any:
    return make_state_model("recurrent_gemma")


@pytest.fixture
def counts(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each call of the first block has had."""
    found: list[int] = []
    block_class = type(blocks(model)[0])
    own = block_class.forward

    def counted(block: Any, rows: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if block.rg_lru.recurrent_param is blocks(model)[0].rg_lru.recurrent_param:
            found.append(rows.shape[1])
        return own(block, rows, *args, **kwargs)

    monkeypatch.setattr(block_class, "forward", counted)
    return found


def blocks(model: Any) -> list[Any]:
    return [layer.temporal_block for layer in model.model.layers if hasattr(layer.temporal_block, "rg_lru")]


def computed(loop: StateLoop) -> torch.Tensor:
    return torch.cat([loop.step([portion])[0] for portion in PORTIONS])


def test_each_piece_is_one_call(model: Any, counts: list[int]) -> None:
    (tokens,) = random_tokens(12)
    expected, loop = own_logits(model, tokens), StateLoop(model, [tokens], num_slots=3)
    counts.clear()
    assert_near(computed(loop), expected)
    assert counts == [4, 1, 2, 1, 4]
    for mark, position in ((0, 7), (2, 8)):
        assert_near(loop.step([Portion(0, position, 12, mark)])[0], expected[position:])


def test_a_replaced_forward_computes_one_by_one(model: Any, counts: list[int]) -> None:
    (tokens,) = random_tokens(12)
    expected = own_logits(model, tokens)
    for block in blocks(model):
        block.forward = types.MethodType(type(block).forward, block)
    loop = StateLoop(model, [tokens], num_slots=3)
    counts.clear()
    assert_near(computed(loop), expected)
    assert counts == [4] + [1] * 8


def test_another_convolution_computes_one_by_one(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first, own = blocks(model)[0].conv_1d, blocks(model)[0].conv_1d.forward
    monkeypatch.setattr(first, "forward", lambda columns: own(columns).roll(1, dims=-1))
    assert [mixer.is_stepwise for mixer in ModelStates.of_model(model).mixers] == [True, False]


def test_a_block_that_leaves_its_convolution_out_later_is_refused(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tokens,) = random_tokens(12)
    loop = StateLoop(model, [tokens], num_slots=3)
    monkeypatch.setattr(type(blocks(model)[0]), "forward", lambda block, rows, **kwargs: (rows, None))
    with pytest.raises(
        ValueError, match="RecurrentGemmaRecurrentBlock must call conv_1d for several tokens, it did not"
    ):
        loop.step([Portion(0, 5, 12, 1)])

"""Blocks of RecurrentGemma, which hold their states: a portion after the first is one call, and exact."""

import types
from typing import Any

import pytest
import torch
from support.state_engines import ask, make_engine, own_tokens
from support.state_loop import Portion, StateLoop, assert_near, own_logits, random_tokens
from support.state_models import make_state_model

from kvpage.serving import BeamSearchParams
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


def test_a_step_that_is_not_part_of_the_whole_is_refused(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first, own = blocks(model)[0].conv_1d, blocks(model)[0].conv_1d.forward
    monkeypatch.setattr(first, "forward", lambda columns: own(columns).roll(1, dims=-1))
    with pytest.raises(ValueError, match="as a prompt's tokens are, RecurrentGemmaRecurrentBlock does not"):
        ModelStates.of_model(model)


def test_an_engine_computes_beside_the_model(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Making one, and its steps, must neither call the model's own blocks nor touch their states."""
    own_tokens(model, [3, 5, 7], 2)
    before = [(block.conv1d_state, block.rg_lru.recurrent_states) for block in blocks(model)]
    called: list[object] = []
    for module in (part for block in blocks(model) for part in (block, block.rg_lru)):
        monkeypatch.setattr(type(module), "forward", counting(type(module).forward, module, called))
    engine = make_engine(model)
    assert len(ask(engine, [3, 5, 7, 9], 3)[0]) == 3
    assert not called
    after = [(block.conv1d_state, block.rg_lru.recurrent_states) for block in blocks(model)]
    assert all(one is other for pair in zip(before, after, strict=True) for one, other in zip(*pair, strict=True))


def counting(own: Any, module: object, called: list[object]) -> Any:
    def forward(self: object, *args: Any, **kwargs: Any) -> Any:
        if self is module:
            called.append(self)
        return own(self, *args, **kwargs)

    return forward


def test_beams_are_those_of_the_logits(model: Any) -> None:
    """Those of `generate` go on from states of other beams."""
    prompt, params = (
        [3, 5, 7, 9, 11],
        BeamSearchParams(num_beams=2, num_return_sequences=2, max_tokens=4, ignore_eos=True),
    )
    found = make_engine(model).beam_search([prompt], params)[0]
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    for _ in range(4):
        rows = [(score, tokens, own_logits(model, prompt + tokens)[-1].log_softmax(-1)) for score, tokens in beams]
        each = [
            (score + row[token].item(), [*tokens, token]) for score, tokens, row in rows for token in range(len(row))
        ]
        beams = sorted(each, key=lambda beam: -beam[0])[:2]
    assert [beam.token_ids for beam in found.beams] == [tokens for _, tokens in beams]


def test_a_block_that_leaves_its_convolution_out_later_is_refused(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tokens,) = random_tokens(12)
    loop = StateLoop(model, [tokens], num_slots=3)
    monkeypatch.setattr(type(blocks(model)[0]), "forward", lambda block, rows, **kwargs: (rows, None))
    with pytest.raises(
        ValueError, match="RecurrentGemmaRecurrentBlock must call conv_1d for several tokens, it did not"
    ):
        loop.step([Portion(0, 5, 12, 1)])

"""StatePass: what it refuses before anything is computed. PieceCache against transformers' own cache."""

import pytest
import torch
from support.state_loop import Portion, StateLoop, random_tokens
from support.state_models import make_state_model
from transformers import DynamicCache

from kvpage.cache.state_cache import StateCache
from kvpage.layout.groups import StateLayout, StatePart
from kvpage.serving.model.hf_cache.seen_cache import state_of
from kvpage.serving.model.states.piece_cache import ARE_NUMBERED, PieceCache
from kvpage.serving.model.states.row_cuts import Cut, cut, join
from kvpage.serving.model.states.state_pass import StatePass, StateRow

LAYOUT = StateLayout.of_parts(
    [StatePart(0, "conv", 0, (3, 4), torch.float32), StatePart(0, "recurrent", 0, (2, 2), torch.float32)]
)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "rows must be one or more, got 0"),
        ([StateRow(0, 3, 3)], r"start must be in \[0, end\), got start 3 and end 3"),
        ([StateRow(0, -1, 3)], r"start must be in \[0, end\), got start -1 and end 3"),
        ([StateRow(4, 0, 3)], r"slots must be in \[0, 4\), got \[4\]"),
        ([StateRow(-1, 0, 3)], r"slots must be in \[0, 4\), got \[-1\]"),
        ([StateRow(1, 0, 3), StateRow(1, 4, 5)], "slots must be named once in a step"),
        ([StateRow(1, 0, 3, [(2, 1)])], "slots must be named once in a step"),
        ([StateRow(1, 0, 3, [(2, 0)]), StateRow(2, 0, 3, [(2, 0)])], "slots must be named once in a step"),
        ([StateRow(1, 2, 6, [(2, 0)])], r"marks must be in \(2, 6\], got \[2\]"),
        ([StateRow(1, 2, 6, [(3, 0), (7, 2)])], r"marks must be in \(2, 6\], got \[3, 7\]"),
        ([StateRow(1, 2, 6, [(5, 0), (4, 2)])], r"marks must be in ascending order, got \[5, 4\]"),
        ([StateRow(1, 2, 6, [(5, 4)])], r"slots must be in \[0, 4\), got \[4\]"),
    ],
)
def test_bad_rows_are_refused(rows: list[StateRow], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        StatePass(StateCache(LAYOUT, 4), rows)


def test_a_step_that_does_not_fit_computes_nothing() -> None:
    loop = StateLoop(make_state_model("lfm2"), random_tokens(6, 6), num_slots=4)
    portions = [Portion(0, 0, 4, 1), Portion(1, 0, 2, 2)]
    before, blocks = loop.states.slots.clone(), [layer.clone() for layer in loop.cache.gpu_cache]
    other = loop.step_of([Portion(0, 0, 3, 1), Portion(1, 0, 2, 2)])
    for states, words in (
        (None, "step must have states for Lfm2ForCausalLM"),
        (other.states, "rows must have the step's"),
    ):
        step = loop.step_of(portions)
        step.use_states(states)
        with pytest.raises(ValueError, match=words):
            loop.runner.forward(loop.packed(portions), step)
    assert torch.equal(loop.states.slots, before)
    for layer, block in zip(loop.cache.gpu_cache, blocks, strict=True):
        assert torch.equal(layer.view(torch.int32), block.view(torch.int32))


def test_states_are_of_one_pass() -> None:
    loop = StateLoop(make_state_model("lfm2"), random_tokens(6), num_slots=4)
    step = loop.step_of([Portion(0, 0, 4, 1)])
    loop.runner.forward(loop.packed([Portion(0, 0, 4, 1)]), step)
    again = loop.step_of([Portion(0, 0, 4, 1)])
    again.use_states(step.states)
    with pytest.raises(ValueError, match="states must be those of one forward pass"):
        loop.runner.forward(loop.packed([Portion(0, 0, 4, 1)]), again)


def test_two_marks_at_one_position() -> None:
    loop = StateLoop(make_state_model("mamba2"), random_tokens(6), num_slots=5)
    loop.step([Portion(0, 0, 6, 4, ((3, 0), (3, 1), (6, 2)))])
    assert torch.equal(loop.states.slots[0], loop.states.slots[1])
    assert torch.equal(loop.states.slots[2], loop.states.slots[4])
    assert not torch.equal(loop.states.slots[0], loop.states.slots[2])


KEYS = (0, "conv", 0), (0, "recurrent", 0)


@pytest.mark.parametrize("slots", [slice(1, 3), torch.tensor([3, 0])], ids=["neighbours", "gathered"])
@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5])
def test_a_piece_cache_is_like_transformers_own(slots: slice | torch.Tensor, num_tokens: int) -> None:
    states = StateCache(LAYOUT, 4)
    states.slots.fill_(0xFF)
    config = make_state_model("mamba2").config
    own = DynamicCache(config=config)
    for number in range(3):
        ours = PieceCache(states.views, slots, has_previous=number > 0)
        for cache in (own, ours):
            assert cache.has_previous_state(0) == (number > 0)
        new, recurrent = torch.randn(2, 3, num_tokens), torch.randn(2, 2, 2)
        if not number and not ARE_NUMBERED:  # mixers give all columns of the state
            new = torch.nn.functional.pad(new, (4 - num_tokens, 0))
        for key in KEYS:
            assert_same(state_of(ours, key), state_of(own, key) if number else None)
        assert_same(ours.update_conv_state(new, 0), own.update_conv_state(new, 0, conv_kernel_size=4))
        assert_same(ours.update_recurrent_state(recurrent, 0), own.update_recurrent_state(recurrent, 0))
        ours.write_back()
        for key in KEYS:
            assert_same(states.views[key][slots], state_of(own, key))
    others = [slot for slot in range(4) if slot not in torch.arange(4)[slots].tolist()]
    assert (states.slots[others] == 0xFF).all()


def assert_same(found: torch.Tensor | None, expected: torch.Tensor | None) -> None:
    assert (found is None) == (expected is None)
    assert found is None or expected is None or torch.equal(found, expected)


def test_a_state_of_another_shape_is_refused() -> None:
    states = StateCache(LAYOUT, 4)
    for slots in (slice(1, 2), torch.tensor([1])):
        cache = PieceCache(states.views, slots, has_previous=False)
        with pytest.raises(ValueError, match=r"the recurrent state 0 of layer 0 must have the shape \[2, 2\]"):
            cache.update_recurrent_state(torch.zeros(1, 1, 2), 0)
    assert not states.slots.any()


def test_cuts_join_to_the_row() -> None:
    row = torch.randn(1, 6, 2)
    cuts = [Cut(torch.tensor([0, 3]), True), Cut(slice(1, 3), False), Cut(slice(4, 6), False)]
    given = row, {"positions": torch.arange(6), "table": torch.zeros(3, 2)}, [row[..., 0], None], "word"
    parts = [cut(given, 6, at) for at in cuts]
    assert [part[0].shape for part in parts] == [(2, 1, 2), (1, 2, 2), (1, 2, 2)]
    assert [part[1]["positions"].tolist() for part in parts] == [[0, 3], [1, 2], [4, 5]]
    assert all(part[1]["table"].shape == (3, 2) and part[2][1] is None and part[3] == "word" for part in parts)
    joined = join([(part[0], None, part[2][0]) for part in parts], 6, cuts)
    assert torch.equal(joined[0], row) and joined[1] is None and torch.equal(joined[2], row[..., 0])


def test_an_output_that_is_not_of_its_tokens_is_refused() -> None:
    cuts = [Cut(slice(0, 2), False)]
    with pytest.raises(ValueError, match=r"a mixer's output must have the sizes \[1, 2\] first, got \[1, 3\]"):
        join([torch.zeros(1, 3)], 2, cuts)
    with pytest.raises(ValueError, match="a mixer's output must be tensors or None, got str"):
        join(["word"], 2, cuts)

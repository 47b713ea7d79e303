"""Branches, beams and scored prompts over models with states."""

import pytest
import torch
from support.state_engines import (
    B,
    ask,
    check_nothing_held,
    greedy,
    make_engine,
    own_tokens,
    random_prompt,
    states_for,
)
from support.state_loop import assert_near, own_logits
from support.state_models import make_state_model

from kvpage.serving import BeamSearchParams, Branches

PROMPT = random_prompt(2 * B + 3)


@pytest.fixture(params=["jamba", "lfm2", "mamba2", "qwen3_next"])
def model(request: pytest.FixtureRequest):
    return make_state_model(request.param)


def test_a_failed_computation_begins_again(model) -> None:
    engine = make_engine(model, max_num_batched_tokens=8)
    expected = own_logits(model, [*PROMPT, 4, 9])
    layers = list(model.model.layers if hasattr(model, "model") else model.backbone.layers)
    with Branches(engine) as branches:
        branch, other = branches.start(PROMPT), branches.start(PROMPT[:3])
        branches.compute([branch])
        fork = branches.fork(branch)
        branch.append([4, 9])
        hook = layers[-1].register_forward_pre_hook(fail)
        with pytest.raises(ArithmeticError):
            branches.compute([branch, other])
        hook.remove()
        assert branch.num_computed == other.num_computed == 0 and branch.token_ids.tolist() == [*PROMPT, 4, 9]
        rows = branches.compute([branch, other], [[len(PROMPT) + 1, len(PROMPT) + 2], [3]])
        assert_near(rows, torch.cat([expected[-2:], own_logits(model, PROMPT[:3])[-1:]]))
        fork.append([4])
        assert_near(branches.compute([fork])[0], expected[-2])
        fork.append([9])
        with pytest.raises(ArithmeticError):
            hook = layers[-1].register_forward_pre_hook(fail)
            branches.compute([fork])
        hook.remove()
    check_nothing_held(engine)
    assert ask(engine, PROMPT, 4)[0] == own_tokens(model, PROMPT, 4)


def fail(module: torch.nn.Module, args: object) -> None:
    raise ArithmeticError("a layer has failed")


def test_branches_take_slots_from_requests(model) -> None:
    engine = make_engine(model, states=states_for(make_engine(model), 0), max_num_seqs=2)
    engine.add_request(PROMPT, greedy(4))
    engine.step()
    with Branches(engine) as branches:
        both = [branches.start(PROMPT), branches.start(PROMPT[:5])]
        branches.compute(both)
        assert engine.stats().num_preemptions == 1
    assert engine.stats().num_waiting == 1
    while engine.has_unfinished:
        outputs = engine.step()
    assert outputs[-1].output.samples[0].token_ids == own_tokens(model, PROMPT, 4)
    check_nothing_held(engine)


@pytest.mark.parametrize("num_returned", [1, 3])
@pytest.mark.parametrize("kind", ["jamba", "lfm2", "mamba2", "qwen3_next", "zamba2"])
def test_the_next_turn_goes_on_from_the_best_beams(kind, num_returned) -> None:
    """Also of Zamba2: beams are computed by the scan's rule, as prompts are."""
    model = make_state_model(kind)
    engine = make_engine(model)
    params = BeamSearchParams(num_beams=3, max_tokens=6, num_return_sequences=num_returned, ignore_eos=True)
    beams = engine.beam_search([PROMPT], params)[0].beams
    check_nothing_held(engine)
    for beam in beams:
        turn = [*PROMPT, *beam.token_ids, 4, 9]
        tokens, num_found = ask(engine, turn, 3)
        assert num_found == len(PROMPT) + 5 and tokens == own_tokens(model, turn, 3)


def test_a_spoiled_branch_keeps_no_end(model) -> None:
    engine = make_engine(model)
    layers = list(model.model.layers if hasattr(model, "model") else model.backbone.layers)
    hook = layers[-1].register_forward_pre_hook(fail)
    with Branches(engine) as branches:
        branch = branches.start(PROMPT)
        with pytest.raises(ArithmeticError):
            branches.compute([branch])
        branches.keep_end(branch)
        branches.release([branch])
        with pytest.raises(KeyError, match="has not ended"):
            branches.keep_end(branch)
    hook.remove()
    assert engine.stats().blocks.slots.num_checkpoints == 0
    check_nothing_held(engine)

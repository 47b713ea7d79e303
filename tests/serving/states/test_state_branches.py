"""Branches, beams and scored prompts over models with states."""

import pytest
import torch
from support.state_engines import (
    B,
    ask,
    check_nothing_held,
    greedy,
    make_engine,
    own_beams,
    own_tokens,
    random_prompt,
    states_for,
)
from support.state_loop import assert_near, own_logits
from support.state_models import make_state_model

from kvpage.serving import BeamSearchParams, Branches
from kvpage.serving.model.states.model_states import are_states_served

PROMPT = random_prompt(2 * B + 3)


@pytest.fixture(params=["jamba", "lfm2", "mamba2", "qwen3_next"])
def model(request: pytest.FixtureRequest):
    return make_state_model(request.param)


@pytest.mark.parametrize("num_batched_tokens", [4, 64])
def test_beams_are_those_of_generate(model, num_batched_tokens: int) -> None:
    if model.config.model_type == "mamba2" and not are_states_served("5.13"):
        pytest.skip("before transformers 5.13 generate does not reorder the states of Mamba's beams")
    engine = make_engine(model, max_num_batched_tokens=num_batched_tokens)
    params = BeamSearchParams(num_beams=3, num_return_sequences=3, max_tokens=6, ignore_eos=True)
    expected = own_beams(model, PROMPT, 3, 6)
    first, again = (engine.beam_search([PROMPT], params)[0] for _ in range(2))
    assert [beam.token_ids for beam in first.beams] == [beam.token_ids for beam in again.beams] == expected
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, len(PROMPT) - 1)
    check_nothing_held(engine)


def test_each_fork_has_a_state_of_its_own(model) -> None:
    engine = make_engine(model)
    with Branches(engine) as branches:
        trunk = branches.start(PROMPT)
        branches.compute([trunk])
        assert branches.first_forkable(trunk) == len(PROMPT)
        with pytest.raises(ValueError, match=f"num_tokens must be all {len(PROMPT)}"):
            branches.fork(trunk, len(PROMPT) - 1)
        forks = [trunk, branches.fork(trunk), branches.fork(trunk)]
        for token, branch in enumerate(forks):
            branch.append([token + 5, token + 1])
        logits = branches.compute(forks)
        for row, branch in zip(logits, forks, strict=True):
            assert_near(row, own_logits(model, branch.token_ids.tolist())[-1])
    check_nothing_held(engine)


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


def test_log_probabilities_of_a_prompt(model) -> None:
    engine = make_engine(model, max_num_batched_tokens=5)
    for _ in range(2):
        (output,) = engine.generate([PROMPT], greedy(2, prompt_logprobs=0))
        expected = own_logits(model, PROMPT).log_softmax(dim=-1)
        found = [one.logprob for one in output.prompt_logprobs[1:]]
        rows = [float(expected[at, token]) for at, token in enumerate(PROMPT[1:])]
        assert found == pytest.approx(rows, abs=1e-4)
        assert output.samples[0].token_ids == own_tokens(model, PROMPT, 2)
    check_nothing_held(engine)

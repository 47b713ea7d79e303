"""Answers of a model whose weights change between calls."""

import functools
from dataclasses import replace
from types import MethodType

import pytest
import torch
from support.fake_trainer import change_weights
from support.models import VOCAB, generate_each, make_model, make_prompts

from kvpage import CacheConfig
from kvpage.integrations.trl import PolicyEngine, rollout_config
from kvpage.integrations.trl.trained_model import eval_mode, stand_in
from kvpage.serving import EngineConfig, SamplingParams, WeightsChanged

B = 4
GREEDY = SamplingParams(max_tokens=6, temperature=0.0)
DRAWN = SamplingParams(max_tokens=4, temperature=1.0, top_k=0, logprobs=0)


def config(num_blocks: int = 256, max_num_seqs: int = 8) -> EngineConfig:
    return EngineConfig(CacheConfig(block_size=B, num_gpu_blocks=num_blocks), max_num_seqs=max_num_seqs)


@pytest.fixture
def model():
    return make_model("qwen3")


def tokens_of(policy: PolicyEngine, prompts: list[list[int]]) -> list[list[int]]:
    return [sample.token_ids for sample in policy.sample(prompts, GREEDY)]


def test_answers_are_those_of_generate_in_the_order_of_the_prompts(model):
    a, b, *edges = make_prompts([9, 30, 1, B - 1, B, B + 1])
    prompts = [a, b, a, *edges, b]
    assert tokens_of(PolicyEngine(model, config()), prompts) == generate_each(model, prompts, 6)


def test_no_prompts_have_no_answers(model):
    assert PolicyEngine(model, config()).sample([], GREEDY) == []


def test_answers_have_the_log_probabilities_of_their_score(model):
    """Bit by bit, before and after a change of weights: the ratio of a first update is exactly 1."""
    policy, prompts = PolicyEngine(model, replace(config(), same_bits=True)), make_prompts([9, 30, 1])
    for seed in (1, 2):
        answers = policy.sample(prompts, DRAWN)
        scores = policy.score([[*prompt, *answer.token_ids] for prompt, answer in zip(prompts, answers, strict=True)])
        for prompt, answer, score in zip(prompts, answers, scores, strict=True):
            assert score[len(prompt) - 1 :] == [token.logprob for token in answer.logprobs]
        change_weights(model, seed)


def test_a_group_computes_its_prompt_once(model):
    policy, (prompt,) = PolicyEngine(model, config()), make_prompts([40])
    policy.sample([prompt] * 8, DRAWN)
    assert policy.engine.stats().num_computed_tokens == 40 + 8 * 3  # the last token of each is not fed back


def test_a_group_of_more_than_run_at_once_finds_its_prompt(model):
    policy, (prompt,) = PolicyEngine(model, config(max_num_seqs=2)), make_prompts([40])
    samples = policy.sample([prompt] * 5, DRAWN)
    assert [len(sample.token_ids) for sample in samples] == [4] * 5
    assert policy.engine.stats().num_computed_tokens < 2 * 40


def test_answers_are_those_of_the_weights_at_the_call(model):
    prompts = make_prompts([9, 30])
    policy, seen = PolicyEngine(model, config()), []
    for seed in range(3):
        seen.append(tokens_of(policy, prompts))
        assert seen[-1] == generate_each(model, prompts, 6)
        change_weights(model, seed)
    assert seen[0] != seen[1] != seen[2]


@pytest.mark.parametrize("change", ["in place", "by data", "by load_state_dict", "another layer", "a hook"])
def test_every_way_to_change_the_model_counts(model, change):
    prompts = make_prompts([9, 30])
    policy = PolicyEngine(model, config())
    before = tokens_of(policy, prompts)
    if change == "in place":
        change_weights(model, 1)
    elif change == "by data":
        for weight in model.parameters():
            weight.data = weight.data.flip(0)
    elif change == "by load_state_dict":
        model.load_state_dict({name: weight.flip(0) for name, weight in model.state_dict().items()})
    elif change == "another layer":
        model.model.layers[0].mlp.down_proj = torch.nn.Linear(48, 32, bias=False)
    else:
        model.model.layers[0].register_forward_hook(lambda module, inputs, output: output * -1.0)
    after = tokens_of(policy, prompts)
    assert after == generate_each(model, prompts, 6) != before


def test_without_forgetting_the_answers_would_be_stale(model, monkeypatch):
    """The tests above would fail if K and V outlived their weights."""
    prompts = make_prompts([30])
    policy = PolicyEngine(model, config())
    monkeypatch.setattr(policy.engine, "reset_prefix_cache", lambda: None)
    tokens_of(policy, prompts)
    change_weights(model, 1)
    with pytest.raises(WeightsChanged):
        tokens_of(policy, prompts)
    policy.engine.loop.watch_weights(lambda may_admit: None)
    assert tokens_of(policy, prompts) != generate_each(model, prompts, 6)


def test_fixed_weights_let_turns_find_each_other_and_nothing_is_left_afterwards(model):
    policy, (prompt,) = PolicyEngine(model, config()), make_prompts([40])
    tokens_of(policy, [prompt])
    with policy.fixed_weights():
        (first,) = tokens_of(policy, [prompt])
        num_before = policy.engine.stats().num_cached_tokens
        assert num_before == 0
        turn = [*prompt, *first, 5, 6, 7]
        assert tokens_of(policy, [turn]) == generate_each(model, [turn], 6)
        assert policy.engine.stats().num_cached_tokens == (40 + len(first) - 1) // B * B
    assert policy.engine.manager.num_free_blocks == policy.engine.manager.num_blocks
    tokens_of(policy, [turn])
    assert policy.engine.stats().num_cached_tokens == (40 + len(first) - 1) // B * B


def test_fixed_weights_are_entered_once_and_end_with_an_error(model):
    policy, (prompt,) = PolicyEngine(model, config()), make_prompts([9])
    with pytest.raises(RuntimeError, match="left before"), policy.fixed_weights(), policy.fixed_weights():
        pass
    with pytest.raises(ZeroDivisionError), policy.fixed_weights():
        tokens_of(policy, [prompt])
        _ = 1 / 0
    change_weights(model, 1)
    assert tokens_of(policy, [prompt]) == generate_each(model, [prompt], 6)


def test_drawn_answers_have_the_models_probabilities(model):
    """Of 4,000 first tokens, each likely one comes about as often as the model says. The seed is fixed."""
    policy, (prompt,) = PolicyEngine(model, config(2048, 256)), make_prompts([12])
    params = SamplingParams(max_tokens=1, temperature=1.5, top_k=0)
    torch.manual_seed(1)
    samples = policy.sample([prompt] * 4000, params)
    counts = torch.bincount(torch.tensor([sample.token_ids[0] for sample in samples]), minlength=VOCAB)
    with torch.no_grad():
        chances = (model(torch.tensor([prompt])).logits[0, -1] / 1.5).softmax(-1)
    likely = chances * 4000 >= 5
    expected = torch.cat([chances[likely], chances[~likely].sum()[None]]) * 4000
    found = torch.cat([counts[likely], counts[~likely].sum()[None]])
    chi_square = ((found - expected) ** 2 / expected).sum().item()
    assert chi_square < len(expected) + 4 * (2 * len(expected)) ** 0.5


def test_log_probabilities_are_the_models(model):
    policy, prompts = PolicyEngine(model, config()), make_prompts([9, 30])
    for prompt, sample in zip(prompts, policy.sample(prompts, DRAWN), strict=True):
        row = [*prompt, *sample.token_ids]
        with torch.no_grad():
            expected = model(torch.tensor([row])).logits[0].log_softmax(-1)
        wanted = [expected[at - 1, row[at]].item() for at in range(len(prompt), len(row))]
        assert [one.logprob for one in sample.logprobs] == pytest.approx(wanted, abs=1e-4)


def test_seeds_of_torch_decide_what_is_drawn(model):
    policy, (prompt,) = PolicyEngine(model, config()), make_prompts([12])

    def drawn(seed: int) -> list[list[int]]:
        torch.manual_seed(seed)
        return [sample.token_ids for sample in policy.sample([prompt] * 4, DRAWN)]

    assert drawn(1) == drawn(1) != drawn(2)
    assert len({tuple(tokens) for tokens in drawn(1)}) > 1


def test_modes_of_modules_are_as_before_also_after_an_error(model):
    model.train()
    model.model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    policy = PolicyEngine(model, config())
    assert tokens_of(policy, make_prompts([9]))
    with pytest.raises(ValueError, match=r"tokens must be ids in \[0, 199\)"):
        tokens_of(policy, [[VOCAB]])
    with pytest.raises(ZeroDivisionError), eval_mode(model):
        assert not any(module.training for module in model.modules())
        _ = 1 / 0
    assert [module.training for module in model.modules()] == modes


def test_gradients_flow_through_the_model_afterwards(model):
    model.train()
    policy, (prompt,) = PolicyEngine(model, config()), make_prompts([9])
    tokens_of(policy, [prompt])
    model(torch.tensor([prompt])).logits.sum().backward()
    assert all(weight.grad is not None for weight in model.parameters())


def test_a_patched_forward_is_passed_by_where_it_computes_the_same(model):
    own = model.forward

    @functools.wraps(type(model).forward)
    def patched(self, *args, **kwargs):
        return own(*args, **kwargs)

    model.forward = MethodType(patched, model)
    prompts = make_prompts([9])
    assert tokens_of(PolicyEngine(model, config()), prompts) == generate_each(model, prompts, 6)
    assert "forward" in vars(model) and "forward" not in vars(stand_in(model))


def test_a_patched_forward_that_computes_something_else_is_refused(model):
    own = model.forward

    def patched(self, *args, **kwargs):
        output = own(*args, **kwargs)
        output.logits = output.logits + 1.0
        return output

    model.forward = MethodType(patched, model)
    with pytest.raises(ValueError, match="the patched one gives other logits"):
        PolicyEngine(model, config())


def test_answers_end_where_the_model_does(model):
    (prompt,) = make_prompts([250])
    (sample,) = PolicyEngine(model, config()).sample([prompt], SamplingParams(max_tokens=20, temperature=0.0))
    assert len(sample.token_ids) == 6 and sample.finish_reason == "length"


def test_an_answer_that_cannot_be_computed_is_an_error(model):
    policy = PolicyEngine(model, config())
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(RuntimeError, match="2 answers to a prompt could not be computed: the logits"):
        policy.sample([[5, 6]] * 2, GREEDY)
    assert not policy.engine.has_unfinished


def test_the_settings_by_default_hold_so_many_whole_sequences(model):
    made = rollout_config(model, max_num_seqs=3)
    assert made.max_num_seqs == 3 and made.cache_config.num_gpu_blocks == 3 * 256 // 16
    prompts = make_prompts([9])
    assert tokens_of(PolicyEngine(model), prompts) == generate_each(model, prompts, 6)

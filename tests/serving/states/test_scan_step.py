"""Mixers that limit the time step of a prompt's tokens alone: each token is computed by the rule of model.generate.

The limits here are narrow, so that the rules give other tokens.
"""

import inspect
from typing import Any

import pytest
import torch
from support.cpu_graphs import as_on_a_device
from support.state_engines import B, ask, check_nothing_held, greedy, make_engine, own_tokens, random_prompt, states_for
from support.state_loop import Portion, StateLoop, assert_near, own_logits, random_tokens
from support.state_models import SERVED, make_state_model

from kvpage import CacheConfig
from kvpage.serving import KVPageCache, KVPageCachePool
from kvpage.serving.model.states.model_states import ModelStates, are_states_served

pytestmark = pytest.mark.skipif(
    not are_states_served("5.16"), reason="before transformers 5.15 steps are limited, too, and 5.15 hides its code"
)
LIMITED = ("bamba", "falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h", "zamba2")
CACHED = "nemotron_h", "zamba2"
KINDS = [kind for kind in LIMITED if kind in SERVED]
LIMITS = 0.001, 0.1
LENGTHS = 1, B, 2 * B + 1


def mixers(model: Any) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "time_step_limit")]


def limited(kind: str, limits: tuple[float, float] = LIMITS) -> Any:
    """A model some of whose time steps are below the limits, and some above."""
    model = make_state_model(kind, weight_std=0.3)
    for mixer in mixers(model):
        mixer.time_step_limit = limits
        torch.nn.init.normal_(mixer.dt_bias, mean=-4, std=4)
    return model


@pytest.mark.parametrize("kind", ["mamba2", *CACHED])
def test_prompts_are_scanned_and_answers_are_steps(kind: str) -> None:
    model = limited(kind)
    prompts = [random_prompt(length, length) for length in LENGTHS]
    expected = [own_tokens(model, prompt, 5) for prompt in prompts]
    for engine in (
        make_engine(model),
        make_engine(model, max_num_batched_tokens=1),
        as_on_a_device(make_engine(model)),
    ):
        found = engine.generate(prompts, greedy(5, n=2))
        assert [sample.token_ids for one in found for sample in one.samples] == [
            tokens for tokens in expected for _ in range(2)
        ]
        check_nothing_held(engine)


@pytest.mark.parametrize("kind", KINDS)
def test_the_step_is_another_rule(kind: str) -> None:
    model, (tokens,) = limited(kind), random_tokens(12)
    assert all(mixer.steps_apart for mixer in ModelStates.of_model(model).mixers)
    expected, loop = own_logits(model, tokens), StateLoop(model, [tokens], num_slots=2)
    portions = Portion(0, 0, 4, 1, ((3, 0),)), Portion(0, 4, 5, 1), Portion(0, 5, 12, 1)
    assert_near(torch.cat([loop.step([portion])[0] for portion in portions]), expected)
    loop.step(portions[:1])
    stepped = loop.step([Portion(0, 4, 5, 1, num_prompt=4)])[0]
    assert (stepped - expected[4:5]).norm() > 1e-2 * expected[4:5].norm()


def test_limits_that_limit_nothing_share_answers() -> None:
    model, prompt = limited("zamba2", (0.0, float("inf"))), random_prompt(2 * B + 1)
    assert ModelStates.of_model(model).shares_answers
    engine = make_engine(model)
    tokens, _ = ask(engine, prompt, B)
    assert ask(engine, [*prompt, *tokens, 7], 1)[1] == len(prompt) + B - 1


def test_answers_are_no_prompts() -> None:
    model, prompt = limited("nemotron_h"), random_prompt(2 * B + 1)
    engine = make_engine(model)
    tokens, _ = ask(engine, prompt, 2 * B)
    for turn, num_found in ((tokens, 2 * B), ([], 4 * B + 1)):
        prompt = [*prompt, *turn, 7]
        assert ask(engine, prompt, 4) == (own_tokens(model, prompt, 4), num_found)
    check_nothing_held(engine)


@pytest.mark.parametrize("num_host", [0, 8])
def test_preempted_answers_go_on_by_steps(num_host: int) -> None:
    model = limited("nemotron_h")
    budget = states_for(make_engine(model), 2, num_host)
    engine = make_engine(model, num_blocks=12, num_host_blocks=3 * num_host, states=budget)
    prompts = [random_prompt(length, length) for length in (9, 12, 5, 14)]
    found = engine.generate(prompts, greedy(3 * B))
    assert [one.samples[0].token_ids for one in found] == [own_tokens(model, prompt, 3 * B) for prompt in prompts]
    stats = engine.stats()
    assert stats.num_preemptions > 0 and (stats.num_swaps > 0) == (num_host > 0)
    check_nothing_held(engine)


def generated(model: Any, prompt: list[int], cache: KVPageCache | None = None, **options: Any) -> list[int]:
    ids = torch.tensor([prompt])
    settings = {"attention_mask": torch.ones_like(ids), "pad_token_id": 0, "eos_token_id": None, **options}
    return model.generate(ids, past_key_values=cache, max_new_tokens=6, do_sample=False, **settings)[0].tolist()


@pytest.mark.parametrize("kind", CACHED)
@pytest.mark.parametrize("options", [{}, {"prefill_chunk_size": 1}, {"num_beams": 2}])
def test_generate_over_a_cache(kind: str, options: dict[str, int]) -> None:
    model, prompt = limited(kind), random_prompt(2 * B + 1)
    pool = KVPageCachePool.from_model(model, CacheConfig(B, 64))
    for num_found in (0, 2 * B, 2 * B):
        expected = generated(model, prompt, **{**options, "prefill_chunk_size": None})
        with KVPageCache(pool, [prompt]) as cache:
            assert num_found <= cache.get_seq_length() <= 2 * B + 1  # beams keep the prompt's end, too
            assert generated(model, prompt, cache, **options) == expected
        prompt = expected if num_found else prompt
    pool.manager.check()


def test_a_replaced_forward_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = limited("mamba2")
    mixer = mixers(model)[0]
    monkeypatch.setattr(mixer, "forward", mixer.forward)
    with pytest.raises(
        ValueError, match=r"must be computed as a prompt's tokens are, Mamba2Mixer .* is \(0.001, 0.1\)"
    ):
        make_engine(model)


def test_another_step_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = limited("mamba2", (0.0, float("inf")))
    names = inspect.unwrap(type(mixers(model)[0]).forward).__globals__
    own = names["mamba2_selective_state_update"]
    monkeypatch.setitem(names, "mamba2_selective_state_update", lambda *args, **named: own(*args, **named).roll(1, -1))
    with pytest.raises(
        ValueError, match="a token after a state must be computed as a prompt's tokens are, Mamba2Mixer"
    ):
        make_engine(model)

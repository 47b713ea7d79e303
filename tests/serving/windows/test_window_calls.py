"""Calls of an engine whose windows have blocks of their own: branches, beams, resets, failures, what is refused."""

import pytest
import torch
from support.dict_store import DictStore
from support.models import WINDOW, make_model
from support.state_engines import own_tokens, random_prompt
from support.state_loop import assert_near, own_logits
from support.window_engines import B, ask, check_nothing_held, finished, greedy, make_engine, poison

from kvpage import CacheConfig
from kvpage.blend import BlendConfig
from kvpage.blocks.explain import Ending
from kvpage.serving import Branches, Engine, EngineConfig

PROMPT = random_prompt(5 * B + 3)


@pytest.fixture(params=["gemma3", "mistral"])
def model(request: pytest.FixtureRequest):
    return make_model(request.param)


def test_branches_take_the_blocks_of_requests(model) -> None:
    engine = make_engine(model, num_window_blocks=7)
    engine.add_request(PROMPT, greedy(9))
    engine.step()
    with Branches(engine) as branches:
        branch = branches.start(random_prompt(6 * B, 5))
        assert_near(branches.compute([branch])[0], own_logits(model, branch.token_ids.tolist())[-1])
        assert engine.stats().num_preemptions == 1
    (output,) = finished(engine)
    assert output.samples[0].token_ids == own_tokens(model, PROMPT, 9)
    check_nothing_held(engine)


def test_a_failed_step_is_computed_again(model, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(model, max_num_batched_tokens=7)
    others = [engine.add_request(prompt, greedy(9)) for prompt in (PROMPT, random_prompt(9, 1), random_prompt(6, 2))]
    forward, left = engine.debug.runner.forward, iter([True, True, False, True, True, True, False])

    def fail(*args, **kwargs) -> torch.Tensor:
        if not next(left, True):
            forward(*args, **kwargs)
            raise RuntimeError("a step has failed")
        return forward(*args, **kwargs)

    monkeypatch.setattr(engine.debug.runner, "forward", fail)
    outputs = {}
    while engine.has_unfinished:
        poison(engine)
        try:
            steps = engine.step()
        except RuntimeError as error:
            assert "a step has failed" in str(error)
            continue
        outputs.update({one.request_id: one.output for one in steps if one.output is not None})
    for request_id in others:
        output = outputs[request_id]
        assert output.samples[0].token_ids == own_tokens(model, list(output.prompt_token_ids), 9)
    check_nothing_held(engine)


def test_explain_names_each_window() -> None:
    engine = make_engine(make_model("gemma3"))
    ask(engine, PROMPT, 1)
    groups = engine.explain([*PROMPT, 5]).groups
    assert [(group.group, group.num_tokens) for group in groups] == [
        ("attention", 5 * B),
        (f"window of {WINDOW}", 5 * B),
    ]
    assert groups[0].ending is Ending.PROMPT  # as far as whole blocks go


def test_two_windows_and_8_bit_blocks() -> None:
    """Layers with another window have a group of their own, and each layer keeps its scales."""
    model = make_model("gemma3")
    plain, apart = (
        Engine.from_model(
            model,
            EngineConfig(
                CacheConfig(B, 48, cache_dtype="fp8_e4m3"), kv_scales="calibrate", num_window_blocks=num_window_blocks
            ),
        )
        for num_window_blocks in (None, 32)
    )
    scales = [*apart.cache.kv_scales, *apart.window_caches[0].kv_scales]
    for found, layer in zip(scales, (1, 0, 2), strict=True):
        torch.testing.assert_close(found.key, plain.cache.kv_scales[layer].key)
        torch.testing.assert_close(found.value, plain.cache.kv_scales[layer].value)
    prompts = [random_prompt(length, length) for length in (3, 9, 17)]
    found, expected = (engine.generate(prompts, greedy(6)) for engine in (apart, plain))
    assert [one.samples[0].token_ids for one in found] == [one.samples[0].token_ids for one in expected]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_window_blocks": 0}, "num_window_blocks must be an integer of at least 1, got 0"),
        ({"num_window_blocks": True}, "num_window_blocks must be an integer of at least 1, got True"),
        ({"num_window_blocks": "8"}, "num_window_blocks must be an integer of at least 1, got '8'"),
        ({"num_window_blocks": 2}, rf"num_window_blocks must be at least 3, .* in a window of {WINDOW} tokens, got 2"),
        ({"cache_config": CacheConfig(B, 64, backend="mla")}, "backend must be another than 'mla'"),
        ({"cache_config": CacheConfig(B)}, "num_gpu_blocks must be positive with num_window_blocks, got 0"),
        ({"blend": BlendConfig()}, "blend must be None with num_window_blocks"),
        ({"attention_backend": "flashinfer"}, "attention_backend must be 'auto' or 'kvpage' with num_window_blocks"),
        ({"max_model_len": WINDOW}, "num_window_blocks must be None for a model without windows shorter than"),
    ],
)
def test_what_is_refused(fields: dict, words: str) -> None:
    given = {"cache_config": CacheConfig(B, 64), "num_window_blocks": 8, **fields}
    with pytest.raises(ValueError, match=words):
        Engine.from_model(make_model("gemma3"), EngineConfig(**given))


def test_what_needs_one_table_is_refused() -> None:
    with pytest.raises(ValueError, match="num_window_blocks must be None for a model without windows"):
        make_engine(make_model("llama"))
    engine = make_engine(make_model("gemma3"))
    with pytest.raises(ValueError, match="store must keep groups of layers apart .* got DictStore"):
        engine.use_store(DictStore())

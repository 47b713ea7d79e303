"""Rollouts of a trainer: what TRL asks for, what it gets, and what is refused."""

from types import SimpleNamespace

import pytest
import torch
from support.fake_trainer import FakeTrainer, change_weights
from support.models import generate_each, make_model, make_prompts

from kvpage import CacheConfig
from kvpage.integrations.trl import PagedRollouts
from kvpage.integrations.trl.rollouts import check_text_only, completion_params, model_of
from kvpage.serving import EngineConfig

GREEDY = {"do_sample": False}
CONFIG = EngineConfig(CacheConfig(block_size=4, num_gpu_blocks=256))


@pytest.fixture
def model():
    return make_model("llama")


def texts(prompts: list[list[int]]) -> list[str]:
    return [" ".join(map(str, prompt)) for prompt in prompts]


def test_completions_are_those_of_generate_before_and_after_an_update(model):
    rollouts, trainer, prompts = PagedRollouts(CONFIG), FakeTrainer(model, **GREEDY), make_prompts([9, 9, 30])
    for seed in range(3):
        output = rollouts(texts(prompts), trainer)
        assert output == {
            "prompt_ids": prompts,
            "completion_ids": generate_each(model, prompts, 8),
            "logprobs": None,
        }
        change_weights(model, seed)
    assert trainer.accelerator.num_autocasts == 4  # once for the check of the model


def test_completions_end_with_an_end_token_of_the_trainer_or_of_its_generation_config(model):
    (prompt,) = make_prompts([9])
    (tokens,) = generate_each(model, [prompt], 8)
    assert tokens.index(tokens[2]) == 2 and tokens.index(tokens[5]) == 5
    first = FakeTrainer(model, [tokens[5], tokens[2]], **GREEDY)
    second = FakeTrainer(model, [tokens[5]], **GREEDY, eos_token_id=tokens[2])
    for trainer in (first, second):
        assert PagedRollouts(CONFIG)(texts([prompt]), trainer)["completion_ids"] == [tokens[:3]]


def test_parameters_are_those_of_the_plain_generation(model):
    trainer = FakeTrainer(
        model, [7], temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, repetition_penalty=1.2, suppress_tokens=[3]
    )
    params = completion_params(trainer, False)
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.7, 0.9, 5, 0.1)
    assert (params.repetition_penalty, params.suppress_tokens, params.max_tokens) == (1.2, (3,), 8)
    assert (params.stop_token_ids, params.logprobs) == ((7,), None)


def test_log_probabilities_come_where_asked_for(model):
    rollouts, trainer, (prompt,) = PagedRollouts(CONFIG, returns_logprobs=True), FakeTrainer(model), make_prompts([9])
    output = rollouts(texts([prompt] * 3), trainer)
    for tokens, found in zip(output["completion_ids"], output["logprobs"], strict=True):
        with torch.no_grad():
            scores = model(torch.tensor([prompt + tokens])).logits[0, 8:-1].log_softmax(-1)
        assert found == pytest.approx([row[token].item() for row, token in zip(scores, tokens, strict=True)], abs=1e-4)


def test_log_probabilities_at_another_temperature_are_refused(model):
    with pytest.raises(ValueError, match="temperature must be 1 .* got 0.7"):
        PagedRollouts(CONFIG, returns_logprobs=True)(["5 6"], FakeTrainer(model, temperature=0.7))


def test_another_model_gets_another_engine(model):
    rollouts, prompts = PagedRollouts(CONFIG), make_prompts([9])
    rollouts(texts(prompts), FakeTrainer(model, **GREEDY))
    first = rollouts.policy
    rollouts(texts(prompts), FakeTrainer(model, **GREEDY))
    assert rollouts.policy is first
    other = make_model("qwen2")
    output = rollouts(texts(prompts), FakeTrainer(other, **GREEDY))
    assert rollouts.policy is not first and output["completion_ids"] == generate_each(other, prompts, 8)


@pytest.mark.parametrize("name", ["use_vllm", "use_transformers_continuous_batching", "is_fsdp_enabled"])
def test_trainers_with_another_generator_or_parts_of_the_weights_are_refused(model, name):
    trainer = FakeTrainer(model)
    setattr(trainer, name, True)
    with pytest.raises(ValueError, match="fsdp must be off" if name == "is_fsdp_enabled" else f"{name} must be False"):
        PagedRollouts(CONFIG)(["5 6"], trainer)


def test_deepspeed_with_parts_of_the_weights_is_refused(model):
    trainer = FakeTrainer(model, **GREEDY)
    trainer.accelerator.state.deepspeed_plugin = SimpleNamespace(zero_stage=2)
    PagedRollouts(CONFIG)(["5 6"], trainer)
    trainer.accelerator.state.deepspeed_plugin = SimpleNamespace(zero_stage=3)
    with pytest.raises(ValueError, match="zero_stage must be less than 3"):
        PagedRollouts(CONFIG)(["5 6"], trainer)


def test_tools_need_the_trainer(model):
    trainer = FakeTrainer(model)
    trainer.tools = [print]
    with pytest.raises(ValueError, match="use PagedGRPOTrainer"):
        PagedRollouts(CONFIG)(["5 6"], trainer)


def test_images_are_refused_by_the_names_of_their_fields():
    check_text_only(None, {"token_type_ids": [[0]]})
    with pytest.raises(ValueError, match="text alone, got pixel_values"):
        check_text_only(None, {"pixel_values": [1]})
    with pytest.raises(ValueError, match="text alone, got images"):
        check_text_only([["one"]], {})


def test_adapters_are_unwrapped_and_learned_prompts_refused(model):
    wrapped = SimpleNamespace(
        peft_config={"default": SimpleNamespace(is_prompt_learning=False)}, get_base_model=lambda: model
    )
    trainer = FakeTrainer(model)
    trainer.model_wrapped = SimpleNamespace(wrapped=wrapped)
    assert model_of(trainer) is model
    wrapped.peft_config["soft"] = SimpleNamespace(is_prompt_learning=True)
    with pytest.raises(ValueError, match="got soft, which learns a prompt"):
        model_of(trainer)


def test_a_field_of_generation_that_is_not_served_is_refused_by_name(model):
    with pytest.raises(ValueError, match="guidance_scale=2.0"):
        PagedRollouts(CONFIG)(["5 6"], FakeTrainer(model, guidance_scale=2.0))


@pytest.mark.parametrize("arguments", [{"config": CacheConfig()}, {"returns_logprobs": 1}])
def test_arguments_of_another_type_are_refused(arguments):
    with pytest.raises(TypeError, match=next(iter(arguments))):
        PagedRollouts(**arguments)

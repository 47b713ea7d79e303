"""Blending in the serving loop, against a full prefill and against its definition in plain torch."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import pytest
import torch
import transformers as tf
from serving import blend_oracle
from serving.blend_oracle import Place, Recorder
from serving.models import COMMON, make_model, make_prompts

from kvpage import CacheConfig
from kvpage.blend import BlendConfig
from kvpage.serving import Engine, RequestOutput, SamplingParams

B = 4
ONE = SamplingParams(max_tokens=1)
SEGMENTS = make_prompts([9, 4, 13, 1], seed=3)
LEAD = [3, 7]  # in front of the segments: nothing begins as one that is cached by itself
QUESTION = make_prompts([5], seed=4)[0]
FULL = 1e-5  # of the logits' scale

FAMILIES = {
    **{kind: lambda kind=kind: make_model(kind) for kind in (
        "llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "gpt_oss", "phi3", "deepseek_v3")},
    "granite": lambda: from_config(tf.GraniteConfig(**COMMON, embedding_multiplier=3.0, residual_multiplier=0.5)),
    "cohere": lambda: from_config(tf.CohereConfig(**COMMON)),
    "smollm3": lambda: from_config(tf.SmolLM3Config(**COMMON, no_rope_layers=[1, 0, 1])),
    "phi": lambda: from_config(tf.PhiConfig(**COMMON, partial_rotary_factor=0.5)),
    "glm": lambda: from_config(tf.GlmConfig(**COMMON, head_dim=8, partial_rotary_factor=0.5)),
    "linear": lambda: scaled("linear", factor=4.0),
    "yarn": lambda: scaled("yarn", factor=4.0, original_max_position_embeddings=64),
    "llama3": lambda: scaled("llama3", factor=4.0, original_max_position_embeddings=64, low_freq_factor=1.0,
                             high_freq_factor=4.0),
}  # fmt: skip


def from_config(config: tf.PretrainedConfig) -> tf.PreTrainedModel:
    torch.manual_seed(0)
    return tf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()


def scaled(kind: str, **fields: float) -> tf.PreTrainedModel:
    return from_config(tf.LlamaConfig(**COMMON, rope_parameters={"rope_type": kind, "rope_theta": 1e4, **fields}))


@cache
def model_of(family: str) -> tf.PreTrainedModel:
    return FAMILIES[family]()


def make_engine(family: str = "llama", num_blocks: int = 128, ratio: float = 1.0, **fields: object) -> Engine:
    names = ("check_layer", "metric", "separator", "max_bytes", "deadline")
    config = BlendConfig(ratio=ratio, **{name: fields.pop(name) for name in names if name in fields})
    return Engine.from_model(
        model_of(family), CacheConfig(block_size=B, num_gpu_blocks=num_blocks), blend=config, **fields
    )


@contextmanager
def logits_of(engine: Engine) -> Iterator[list[torch.Tensor]]:
    """The logits of every forward pass of the engine inside."""
    seen: list[torch.Tensor] = []
    forward = engine._runner.forward
    engine._runner.forward = lambda *args: seen.append(forward(*args)) or seen[-1]
    yield seen
    engine._runner.forward = forward


def drain(engine: Engine) -> dict[str, RequestOutput]:
    outputs = {}
    while engine.has_unfinished:
        outputs |= {output.request_id: output.output for output in engine.step() if output.output}
    return outputs


def serve(
    engine: Engine, parts: list[list[int]], question: list[int] = QUESTION, lead: list[int] = LEAD
) -> tuple[RequestOutput, torch.Tensor]:
    """One blended prompt of these segments: its output, and the logits of its first token."""
    with logits_of(engine) as seen:
        every = [lead, *parts] if lead else parts
        tokens = [token for part in every for token in part] + question
        request_id = engine.add_request(tokens, ONE, blend=True, segments=[len(part) for part in every])
        output = drain(engine)[request_id]
    return output, seen[-1][-1]


def own_logits(model: tf.PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    return blend_oracle.run(model, tokens, 0, Recorder(check_layer=10**6))


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def standalone(model: tf.PreTrainedModel, parts: list[list[int]]) -> list[Place]:
    starts = [len(LEAD) + sum(map(len, parts[:index])) for index in range(len(parts))]
    return [blend_oracle.place(model, [], part, start) for part, start in zip(parts, starts, strict=True)]


# --- exactness -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_ratio_1_is_a_full_prefill(family: str) -> None:
    model, engine = model_of(family), make_engine(family)
    engine.warm_segments(SEGMENTS)
    parts = [SEGMENTS[index] for index in (2, 0, 3, 1, 0)]
    output, logits = serve(engine, parts)
    assert error(logits, own_logits(model, output.prompt_token_ids)) <= FULL
    assert (output.num_reused_tokens, output.num_recomputed_tokens) == (0, 13 + 9 + 1 + 4 + 9)


@pytest.mark.parametrize("family", FAMILIES)
def test_any_ratio_is_what_the_definition_says(family: str) -> None:
    model, engine = model_of(family), make_engine(family, ratio=0.3)
    engine.warm_segments(SEGMENTS)
    parts = [SEGMENTS[index] for index in (2, 0, 3, 1, 0)]
    recorder = Recorder(standalone(model, parts), 0.3, 1)
    output, logits = serve(engine, parts)
    expected = blend_oracle.run(model, output.prompt_token_ids, 0, recorder)
    assert error(logits, expected) <= FULL
    assert error(expected, own_logits(model, output.prompt_token_ids)) > 10 * FULL
    assert output.num_recomputed_tokens == len(recorder.chosen) - len(LEAD) - len(QUESTION)
    assert output.num_reused_tokens == 36 - output.num_recomputed_tokens


@pytest.mark.parametrize("metric", ["k", "v", "kv"])
@pytest.mark.parametrize("check_layer", [0, 1, 2])
@pytest.mark.parametrize("ratio", [0, 0.05, 0.5])
def test_ratios_check_layers_and_metrics(ratio: float, check_layer: int, metric: str) -> None:
    if check_layer == 0:
        ratio = float(ratio > 0)  # what layer 0 would choose between is rounding
    model = model_of("llama")
    engine = make_engine(ratio=ratio, check_layer=check_layer, metric=metric)
    engine.warm_segments(SEGMENTS)
    parts = [SEGMENTS[0], SEGMENTS[2]]
    recorder = Recorder(standalone(model, parts), ratio, check_layer, metric)
    output, logits = serve(engine, parts)
    assert error(logits, blend_oracle.run(model, output.prompt_token_ids, 0, recorder)) <= FULL
    assert output.num_recomputed_tokens == len(recorder.chosen) - len(LEAD) - len(QUESTION)


def test_segments_kept_out_of_a_prompt_keep_what_they_saw_there() -> None:
    model, engine = model_of("llama"), make_engine(ratio=0)
    first, _ = serve(engine, SEGMENTS[:3])
    assert (first.num_reused_tokens, first.is_blended) == (0, False)
    parts = [SEGMENTS[2], SEGMENTS[1]]
    places = [
        blend_oracle.place(model, LEAD + SEGMENTS[0] + SEGMENTS[1], SEGMENTS[2], 1),
        blend_oracle.place(model, LEAD + SEGMENTS[0], SEGMENTS[1], 1 + len(SEGMENTS[2])),
    ]
    output, logits = serve(engine, parts, lead=[5])
    assert output.num_reused_tokens == len(SEGMENTS[2]) + len(SEGMENTS[1])
    assert error(logits, blend_oracle.run(model, output.prompt_token_ids, 0, Recorder(places, 0, 1))) <= FULL


def test_standalone_segments_take_the_place_of_others_and_not_the_reverse() -> None:
    model, engine = model_of("llama"), make_engine(ratio=0)
    serve(engine, SEGMENTS[:3])
    engine.warm_segments([SEGMENTS[2]])
    serve(engine, [SEGMENTS[1], [7, 8], SEGMENTS[2]])
    output, logits = serve(engine, [SEGMENTS[2]], lead=[5])
    recorder = Recorder([blend_oracle.place(model, [], SEGMENTS[2], 1)], 0, 1)
    assert error(logits, blend_oracle.run(model, output.prompt_token_ids, 0, recorder)) <= FULL

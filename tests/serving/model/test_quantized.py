"""Serving from caches that quantise: the tokens and logits of a dense model whose K and V go through the reference."""

import itertools
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
import torch
import transformers as tf
from support.models import VOCAB, generate_each, make_model, make_prompts

from kvpage import CacheConfig, CacheEngine, KVScales, ModelConfig
from kvpage.layout.config import CACHE_DTYPES
from kvpage.ops import reference
from kvpage.serving import Engine, EngineConfig, SamplingParams
from kvpage.serving.model.paged_check import paged_logits
from kvpage.serving.model.probe import relative_error
from kvpage.serving.model.runner import ModelRunner

FP8 = ("fp8_e4m3", "fp8_e5m2")
QUANTIZED = (*FP8, "int8")
PLACES = [("flash", "NHD"), ("flash", "HND"), ("flashinfer", "NHD"), ("flashinfer", "HND"), ("paged", "NHD")]
EVERY_PLACE = pytest.mark.parametrize(
    "place, layer_layout", list(itertools.product(PLACES, ("separate", "packed"))), ids=str
)
SEQUENCES = [np.array(prompt, np.int32) for prompt in make_prompts([9, 5], seed=4)]  # as PIECES of the check cut them
PROMPTS = make_prompts([3, 9, 16, 23], seed=2)
GREEDY = SamplingParams(max_tokens=6, temperature=0.0)


def make_config(cache_dtype: str, place: tuple[str, str] = ("flash", "NHD"), layer_layout: str = "separate"):
    return CacheConfig(
        block_size=4, num_gpu_blocks=64, cache_dtype=cache_dtype, backend=place[0], kv_layout=place[1],
        layer_layout=layer_layout,
    )  # fmt: skip


def make_scales(cache_dtype: str, num_layers: int = 3) -> list[KVScales] | None:
    """Different for each layer, and for each head; int8 has its own."""
    if cache_dtype == "int8":
        return None
    return [KVScales.of([0.01 * (layer + 1), 0.02], 0.015) for layer in range(num_layers)]


class DenseModel:
    """A model whose attention sees K and V as a cache of this dtype and these scales would give them back."""

    name = "quantised_reference"

    def __init__(self, kind: str, cache_dtype: str, scales: Sequence[KVScales] | None) -> None:
        self.dtype, self.scales = CACHE_DTYPES[cache_dtype], scales
        self.model = make_model(kind)
        tf.AttentionInterface.register(self.name, self.attend)
        self.model.set_attn_implementation(self.name)

    def attend(self, module, query, key, value, attention_mask, scaling=None, **kwargs):
        scales = None if self.scales is None else self.scales[module.layer_idx]
        key = self.rounded(key[0], None if scales is None else scales.key).repeat_interleave(2, 0)
        value = self.rounded(value[0], None if scales is None else scales.value).repeat_interleave(2, 0)
        scores = query[0] @ key.transpose(1, 2) * scaling
        future = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        return (weights @ value).transpose(0, 1).unsqueeze(0), None

    def rounded(self, rows: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        by_token = rows.transpose(0, 1)  # [tokens, heads, size]
        if self.dtype == torch.int8:
            back = reference.dequantize_int8(*reference.quantize_int8(by_token), torch.float32)
        else:
            scale = torch.ones(1) if scale is None else scale
            back = reference.dequantize_fp8(reference.quantize_fp8(by_token, scale, self.dtype), scale, torch.float32)
        return back.to(rows.dtype).transpose(0, 1)

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        with torch.no_grad():
            return self.model(input_ids=torch.tensor(tokens, dtype=torch.int64)[None], use_cache=False).logits[0]

    def generate(self, prompt: list[int], num_tokens: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(num_tokens):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]


@cache
def expected_logits(kind: str, cache_dtype: str, has_scales: bool) -> torch.Tensor:
    dense = DenseModel(kind, cache_dtype, make_scales(cache_dtype) if has_scales else None)
    return torch.cat([dense.logits(tokens) for tokens in SEQUENCES])


@cache
def plain_logits(kind: str) -> torch.Tensor:
    with torch.no_grad():
        model = make_model(kind)
        return torch.cat([model(torch.tensor(tokens, dtype=torch.int64)[None]).logits[0] for tokens in SEQUENCES])


@cache
def expected_tokens(cache_dtype: str) -> list[list[int]]:
    dense = DenseModel("llama", cache_dtype, make_scales(cache_dtype))
    return [dense.generate(prompt, GREEDY.max_tokens) for prompt in PROMPTS]


def token_ids(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    return [list(output.token_ids) for output in engine.generate(prompts, GREEDY)]


@EVERY_PLACE
@pytest.mark.parametrize("cache_dtype, has_scales", [*itertools.product(FP8, (True, False)), ("int8", False)])
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_logits_are_those_of_a_dense_model_that_rounds_alike(
    place: tuple[str, str], layer_layout: str, cache_dtype: str, kind: str, has_scales: bool
) -> None:
    """Nearer to it, by far, than to the model that does not round."""
    model = make_model(kind)
    model_config = ModelConfig.from_hf(model.config, model.dtype)
    scales = make_scales(cache_dtype) if has_scales else None
    engine = CacheEngine(make_config(cache_dtype, place, layer_layout), model_config, kv_scales=scales)
    found, _ = paged_logits(ModelRunner(model), engine, SEQUENCES, 3)
    expected = expected_logits(kind, cache_dtype, has_scales)
    rounding = relative_error(expected, plain_logits(kind))
    assert rounding > 0.01
    assert relative_error(found, expected) < 0.1 * rounding


@EVERY_PLACE
@pytest.mark.parametrize("cache_dtype", QUANTIZED)
def test_tokens_are_the_same_from_every_backend(place: tuple[str, str], layer_layout: str, cache_dtype: str) -> None:
    config = make_config(cache_dtype, place, layer_layout)
    engine = Engine.from_model(make_model("llama"), EngineConfig(config, kv_scales=make_scales(cache_dtype)))
    assert token_ids(engine, PROMPTS) == expected_tokens(cache_dtype)
    assert token_ids(engine, PROMPTS) == expected_tokens(cache_dtype)  # out of blocks that are cached now
    assert engine.stats().num_cached_tokens > 0
    assert len({token for tokens in expected_tokens(cache_dtype) for token in tokens}) > 5


@pytest.mark.parametrize("cache_dtype", QUANTIZED)
def test_chunks_and_preemption_change_nothing(cache_dtype: str) -> None:
    """What is read back is what was rounded, also by the step that wrote it."""
    config = CacheConfig(block_size=4, num_gpu_blocks=10, cache_dtype=cache_dtype)
    engine = Engine.from_model(
        make_model("llama"), EngineConfig(config, max_num_batched_tokens=13, kv_scales=make_scales(cache_dtype))
    )
    assert token_ids(engine, PROMPTS) == expected_tokens(cache_dtype)
    assert engine.stats().num_preemptions > 0


@pytest.mark.parametrize("layer_layout", ["separate", "packed"])
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_plain_tokens_from_paged_blocks_are_those_of_generate(kind: str, layer_layout: str) -> None:
    engine = Engine.from_model(make_model(kind), EngineConfig(make_config("auto", ("paged", "NHD"), layer_layout)))
    assert token_ids(engine, PROMPTS) == generate_each(make_model(kind), PROMPTS, GREEDY.max_tokens)


@pytest.mark.parametrize("cache_dtype", ["fp16", "bf16"])
def test_half_precision_from_paged_blocks(cache_dtype: str) -> None:
    """The tokens of the same dtype in flash's layout."""
    places = ("paged", "NHD"), ("flash", "NHD")
    engines = [
        Engine.from_model(make_model("llama"), EngineConfig(make_config(cache_dtype, place))) for place in places
    ]
    assert token_ids(engines[0], PROMPTS) == token_ids(engines[1], PROMPTS)


@pytest.mark.parametrize("cache_dtype", QUANTIZED)
def test_double_precision_is_gathered(cache_dtype: str) -> None:
    """Nothing reads such queries in place: K and V are gathered in fp32, with their scales."""
    scales = make_scales(cache_dtype)
    engine = Engine.from_model(make_model("llama").double(), EngineConfig(make_config(cache_dtype), kv_scales=scales))
    dense = DenseModel("llama", cache_dtype, scales)
    dense.model.double()
    expected = [dense.generate(prompt, GREEDY.max_tokens) for prompt in PROMPTS]
    assert token_ids(engine, PROMPTS) == expected
    assert len({token for tokens in expected for token in tokens}) > 5


@pytest.mark.parametrize("cache_dtype", QUANTIZED)
def test_half_precision_is_served(cache_dtype: str) -> None:
    engine = Engine.from_model(
        make_model("llama").bfloat16(), EngineConfig(make_config(cache_dtype), kv_scales=make_scales(cache_dtype))
    )
    assert [len(tokens) for tokens in token_ids(engine, PROMPTS)] == [GREEDY.max_tokens] * len(PROMPTS)


def test_sliding_windows_and_sinks_over_quantised_blocks() -> None:
    """Models with more than one kind of layer: the same tokens from two layouts, and not all of them equal."""
    places = ("flash", "HND"), ("paged", "NHD")
    for kind, cache_dtype in (("gemma3", "fp8_e4m3"), ("gpt_oss", "int8")):
        found = [
            token_ids(Engine.from_model(make_model(kind), EngineConfig(make_config(cache_dtype, p))), PROMPTS)
            for p in places
        ]
        assert found[0] == found[1]
        assert len({token for tokens in found[0] for token in tokens}) > 3


# --- scales ----------------------------------------------------------------------------------------------------------


def cached_rows(model: tf.PreTrainedModel, tokens: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """K and V [tokens, heads, size] of each layer, as transformers' own cache has them."""
    with torch.no_grad():
        layers = model(torch.tensor([tokens]), use_cache=True).past_key_values.layers
    return [(layer.keys[0].transpose(0, 1), layer.values[0].transpose(0, 1)) for layer in layers]


@pytest.mark.parametrize("cache_dtype", FP8)
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_calibrated_scales_are_those_of_the_models_own_cache(kind: str, cache_dtype: str) -> None:
    model, tokens = make_model(kind), make_prompts([37], seed=9)[0]
    expected = [KVScales.from_rows(*rows, CACHE_DTYPES[cache_dtype]) for rows in cached_rows(model, tokens)]
    config = make_config(cache_dtype)
    engine = Engine.from_model(model, EngineConfig(config, kv_scales="calibrate", calibration_tokens=tokens))
    found = engine.cache.kv_scales
    assert found is not None and len(found) == len(expected) == 3
    for mine, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.key, wanted.key)
        torch.testing.assert_close(mine.value, wanted.value)
    assert len({float(scales.key) for scales in found}) == 3
    before = [scales.digest() for scales in found]
    token_ids(engine, PROMPTS)
    assert engine.cache.kv_scales is found and [scales.digest() for scales in found] == before


def test_calibration_has_tokens_of_its_own() -> None:
    engine = Engine.from_model(make_model("llama"), EngineConfig(make_config("fp8_e4m3"), kv_scales="calibrate"))
    dense = DenseModel("llama", "fp8_e4m3", engine.cache.kv_scales)
    assert token_ids(engine, PROMPTS) == [dense.generate(prompt, GREEDY.max_tokens) for prompt in PROMPTS]


def test_without_scales_they_are_one() -> None:
    engine = Engine.from_model(make_model("llama"), EngineConfig(make_config("fp8_e4m3")))
    assert engine.cache.kv_scales is None
    dense = DenseModel("llama", "fp8_e4m3", None)
    assert token_ids(engine, PROMPTS) == [dense.generate(prompt, GREEDY.max_tokens) for prompt in PROMPTS]


WRONG = {
    "scales for int8": ("int8", {"kv_scales": [KVScales.of(1.0, 1.0)] * 3}, "scales must be None for a cache of"),
    "scales for floats": ("auto", {"kv_scales": [KVScales.of(1.0, 1.0)] * 3}, "scales must be None for a cache of"),
    "too few": ("fp8_e4m3", {"kv_scales": [KVScales.of(1.0, 1.0)] * 2}, "kv_scales must be one a layer, 3, got 2"),
    "too many heads": ("fp8_e4m3", {"kv_scales": [KVScales.of([1.0] * 4, 1.0)] * 3}, "must have 1 or 2 entries, got 4"),
    "an unknown word": ("fp8_e4m3", {"kv_scales": "measure"}, "kv_scales must be KVScales, one a layer, 'calib"),
    "calibration of int8": ("int8", {"kv_scales": "calibrate"}, "kv_scales must be None for a cache of torch.int8"),
    "calibration of floats": ("auto", {"kv_scales": "calibrate"}, "kv_scales must be None for a cache of torch.fl"),
    "tokens alone": ("fp8_e4m3", {"calibration_tokens": [1]}, "calibration_tokens must be None unless"),
    "no tokens": ("fp8_e4m3", {"kv_scales": "calibrate", "calibration_tokens": []}, "must be 1 to 256 tokens, got 0"),
    "too many tokens": (
        "fp8_e4m3", {"kv_scales": "calibrate", "calibration_tokens": [1] * 257}, "must be 1 to 256 tokens, got 257",
    ),
    "tokens of another model": (
        "fp8_e4m3", {"kv_scales": "calibrate", "calibration_tokens": [1, VOCAB]}, r"must be ids in \[0, 199\), got 1",
    ),
    "scales that leave nothing": (
        "fp8_e4m3", {"kv_scales": [KVScales.of(1e-6, 1e-6)] * 3}, "logits over blocks of torch.float8_e4m3fn must be",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_scales_that_are_refused(name: str) -> None:
    cache_dtype, arguments, message = WRONG[name]
    model = make_model("llama")
    with pytest.raises(ValueError, match=message):
        Engine.from_model(model, EngineConfig(make_config(cache_dtype), **arguments))
    assert model.config._attn_implementation == "eager"


def test_a_model_that_cannot_be_served_is_not_served_because_blocks_round() -> None:
    """The check at load is as strict as without quantised blocks."""
    model = make_model("llama")
    model.model.embed_tokens.register_forward_hook(
        lambda module, args, output: output + 0.01 * torch.arange(output.shape[1])[None, :, None]
    )
    with pytest.raises(ValueError, match="logits over blocks must be the model's own"):
        Engine.from_model(model, EngineConfig(make_config("fp8_e4m3")))

"""EngineConfig(same_bits=True): tokens and log-probabilities are functions of the model and the request alone."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.family import make_family_model
from support.models import make_model, make_prompts
from support.same_bits import Asked, alone, check_life, live, make_engine, outcome, requests, threads
from support.seeds import seed_of

from kvpage import _C, CacheConfig
from kvpage.blend import BlendConfig
from kvpage.checks.errors import OptionError
from kvpage.ops.cpu import host_layers
from kvpage.serving import Engine, EngineConfig, SamplingParams
from kvpage.serving.assembly import parts
from kvpage.serving.model.native import linear
from kvpage.serving.model.native.bits import experts_forward
from kvpage.serving.model.native.bits.numerics import numerics_name
from kvpage.serving.model.states.fixed import fixed_scans
from kvpage.store import KVStore, KVStoreConfig, LayerwiseStore, metadata_of

DTYPES = torch.float32, torch.bfloat16
PARAMS = SamplingParams(max_tokens=5, temperature=0.0, logprobs=2, ignore_eos=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["llama", "gemma3", "mixtral", "deepseek_v3"])
def test_a_life(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    model = (make_family_model if kind == "mixtral" else make_model)(kind).to(dtype)
    check_life(model, random.Random(seed_of(1)), tmp_path, num_requests=4)


@pytest.mark.parametrize(
    ("kind", "dtype", "fields"),
    [
        ("deepseek_v3", torch.float32, {"backend": "mla"}),
        ("llama", torch.float32, {"cache_dtype": "int8"}),
        ("llama", torch.bfloat16, {"cache_dtype": "fp8_e4m3"}),
        ("gemma3", torch.float32, {"num_window_blocks": 60}),
        ("gpt2", torch.float32, {}),
        ("llama", torch.float16, {}),
    ],
)
def test_a_life_of_other_blocks(tmp_path: Path, kind: str, dtype: torch.dtype, fields: dict[str, Any]) -> None:
    check_life(make_model(kind).to(dtype), random.Random(seed_of(2)), tmp_path, num_requests=3, **fields)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["qwen3_next", "mamba2", "jamba", "lfm2_moe", "kimi_linear", "falcon_h1"])
def test_a_life_of_recurrent_layers(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    check_life(make_family_model(kind).to(dtype), random.Random(seed_of(4)), tmp_path, num_requests=3)


@pytest.mark.parametrize("offset", [1, 3, 4, 5, 31, 32])
@pytest.mark.parametrize("kind", ["llama", "gpt_oss"])
def test_warm_at_any_offset(kind: str, offset: int) -> None:
    model, (prompt,) = make_model(kind), make_prompts([33])
    engine = make_engine(model)
    engine.generate([[*prompt[:offset], 7, 8]], PARAMS)
    engine.generate([[*prompt[:offset], 9]], PARAMS)
    assert outcome(engine.generate([prompt], PARAMS)[0]) == alone(model, [Asked(prompt, PARAMS)])[0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_that_arrive_one_by_one(dtype: torch.dtype) -> None:
    model, (prompt,) = make_model("llama").to(dtype), make_prompts([41])
    engine = make_engine(model)
    with KVStore(KVStoreConfig(8, ("memory://?size=8MiB",)), metadata_of(engine.cache, "m")) as store:
        engine.use_store(LayerwiseStore(store, engine.cache, 1))
        for num_cached in (0, 40):
            (output,) = engine.generate([prompt], PARAMS)
            assert output.num_cached_tokens == num_cached
            assert outcome(output) == alone(model, [Asked(prompt, PARAMS)])[0]
            for save in engine.saves_under_way():
                save.result(120)
            engine.reset_prefix_cache()
        engine.close()


@pytest.mark.parametrize("kind", ["llama", "gpt_oss"])
def test_blending_at_ratio_1(kind: str) -> None:
    model, segments = make_model(kind), make_prompts([13, 9, 21, 5])
    engine = make_engine(model, blend=BlendConfig(ratio=1))
    engine.warm_segments(segments[:3])
    prompt = [*segments[1], *segments[2], *segments[0], *segments[3]]
    engine.add_request(prompt, PARAMS, blend=True, segments=[9, 21, 13])
    output = next(
        step.output for _ in iter(lambda: engine.has_unfinished, False) for step in engine.step() if step.output
    )
    assert output.num_recomputed_tokens > 0
    assert outcome(output) == alone(model, [Asked(prompt, PARAMS)])[0]


@pytest.mark.parametrize("kind", ["llama", "gpt_oss"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rollouts_log_probabilities_are_those_of_its_score(kind: str, dtype: torch.dtype) -> None:
    engine, prompts = make_engine(make_model(kind).to(dtype), portion=16), make_prompts([1, 9, 40])
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=5, logprobs=0, ignore_eos=True)
    rollouts = engine.generate(prompts, params)
    scores = engine.score([[*output.prompt_token_ids, *output.token_ids] for output in rollouts])
    for prompt, output, score in zip(prompts, rollouts, scores, strict=True):
        assert len(score) == len(prompt) + 12 - 1
        assert score[len(prompt) - 1 :] == [token.logprob for token in output.samples[0].logprobs]


def test_scores_without_prompts_and_of_one_token() -> None:
    engine = make_engine(make_model("llama"), same_bits=False)
    assert engine.score([]) == []
    assert engine.score([[5]]) == [[]]
    with pytest.raises(ValueError, match="ids in"):
        engine.score([[5, 199]])


# --- mutants ----------------------------------------------------------------------------------------------------------


OFF = {torch.float32: 1 + 1e-5, torch.bfloat16: 1.02}
"""Of models' dtypes: less than what the check of logits at load allows."""


WITH_LAYERS = 20261129003
"""The seed of a life with native layers: others, of one in five days, would not call what is mutated."""


def nudged(rows: torch.Tensor | None, num_tokens: int, factor: float) -> torch.Tensor | None:
    """The rows, all a little off where they are of an even number of tokens."""
    return rows if rows is None or num_tokens % 2 else rows * factor


MUTATED = {
    "llama": (linear, "host_product", lambda args: args[0].shape[-2]),
    "gpt_oss": (experts_forward, "grouped_linear", lambda args: len(args[1]) // 2),  # each token has two experts
    "qwen3_next": (fixed_scans, "recurrence", lambda args: args[0].shape[1]),
}
"""Of models, what computes some of their rows, and how many tokens it is called for."""


def mutate(monkeypatch: pytest.MonkeyPatch, kind: str, dtype: torch.dtype) -> None:
    """Make one product or scan depend on the number of tokens. dtype: of the model."""
    module, name, count = MUTATED[kind]
    function = getattr(module, name)
    monkeypatch.setattr(
        module, name, lambda *args, **kwargs: nudged(function(*args, **kwargs), count(args), OFF[dtype])
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", MUTATED)
def test_a_row_that_depends_on_the_batch_is_refused(monkeypatch, kind: str, dtype: torch.dtype) -> None:
    mutate(monkeypatch, kind, dtype)
    with pytest.raises(OptionError, match="computed in portions differ"):
        make_engine(make_family_model(kind).to(dtype))


@pytest.mark.parametrize("kind", MUTATED)
def test_a_life_finds_a_row_that_depends_on_the_batch(monkeypatch, tmp_path: Path, kind: str) -> None:
    mutate(monkeypatch, kind, torch.float32)
    monkeypatch.setattr(parts, "verify_bits", lambda *args: None)
    with pytest.raises(AssertionError):
        check_life(make_family_model(kind), random.Random(WITH_LAYERS), tmp_path, num_requests=4)


# --- other machines ---------------------------------------------------------------------------------------------------


def test_products_are_native_where_torch_multiplies_faster(monkeypatch) -> None:
    """As on a processor with tiles of bf16, whose products depend on the number of rows."""
    model, (prompt,) = make_model("llama").to(torch.bfloat16), make_prompts([37])
    expected = alone(model, [Asked(prompt, PARAMS)])
    monkeypatch.setattr(host_layers, "has_fast_linear", lambda dtype: False)
    monkeypatch.setattr(torch.nn.functional, "linear", torch.nn.functional.linear)
    engine = make_engine(model, portion=7)
    assert engine.debug.runner.same_bits
    assert [outcome(engine.generate([prompt], PARAMS)[0])] == expected


def test_threads_that_cannot_be_limited_are_refused(monkeypatch) -> None:
    monkeypatch.setattr("kvpage.serving.model.native.torch_threads.openmp_setter", lambda: None)
    with threads(2), pytest.raises(OptionError, match="cannot be limited"):
        make_engine(make_model("llama"))
    with threads(1):
        make_engine(make_model("llama"))


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_models_that_are_refused_by_name() -> None:
    with pytest.raises(OptionError, match="RecurrentGemmaRecurrentBlock computes one token by a rule of its own"):
        make_engine(make_family_model("recurrent_gemma"))
    with pytest.raises(OptionError, match="torch.float64, whose products are torch's"):
        make_engine(make_model("llama").double())
    with pytest.raises(OptionError, match="DeepseekV2ForCausalLM: it calls aten::polar"):
        make_engine(make_family_model("deepseek_v2"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"compile_model": True}, "compile_model must be False with same_bits"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size must be 1 with same_bits"),
        ({"blend": BlendConfig()}, "blend must be None, or of ratio 1"),
    ],
)
def test_options_that_exclude_it(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        EngineConfig(CacheConfig(4, 8), same_bits=True, **options)
    EngineConfig(CacheConfig(4, 8), **options)


def test_rules_that_torch_applies_are_refused() -> None:
    engine = make_engine(make_model("llama"))
    for rules in ({"no_repeat_ngram_size": 2}, {"typical_p": 0.5, "temperature": 1.0}):
        params = SamplingParams(max_tokens=2, **rules)
        with pytest.raises(ValueError, match=f"{next(iter(rules))} must be None with same_bits"):
            engine.add_request([5, 6], params)
    assert not engine.has_unfinished


# --- stores -----------------------------------------------------------------------------------------------------------


def test_blocks_of_any_size_without_attention() -> None:
    config = EngineConfig(CacheConfig(16, 64), same_bits=True)
    assert Engine.from_model(make_family_model("mamba2"), config).debug.runner.same_bits


def test_records_name_the_arithmetic() -> None:
    engine, plain = make_engine(make_model("llama")), make_engine(make_model("llama"), same_bits=False)
    numerics = engine.stats().numerics
    assert plain.stats().numerics is None and metadata_of(plain.cache, "m").extra == ()
    metadata = metadata_of(engine.cache, "m")
    assert metadata.extra == (("numerics", numerics),) and torch.__version__ in numerics
    config = KVStoreConfig(8, ("memory://?size=8MiB",))
    others = replace(metadata, extra=()), replace(metadata, extra=(("numerics", numerics + " avx2"),))
    for other in others:
        with KVStore(config, other) as store, pytest.raises(ValueError, match="numerics of the store must be"):
            engine.use_store(store)
    with KVStore(config, metadata) as store:
        with pytest.raises(ValueError, match="numerics of the store must be"):
            plain.use_store(store)
        engine.use_store(store)
        engine.close()


def test_the_arithmetic_of_tiles_is_named(monkeypatch) -> None:
    """A processor whose tiles add up in an order of their own is another class."""
    plain = numerics_name()
    monkeypatch.setattr(_C, "linear_kernels", lambda: ["amx", "avx512bf16", "base"])
    names = {plain}
    for name in ("amx", "amx-0123abcd"):
        monkeypatch.setattr(_C, "product_tiles", lambda name=name: (name, ""))
        assert f" {name} torch " in numerics_name()
        names.add(numerics_name())
    assert len(names) == 3


def test_another_class_of_machines_misses(tmp_path: Path) -> None:
    config = KVStoreConfig(8, (f"disk://{tmp_path}?size=16MiB&segment=8MiB",))
    (prompt,) = make_prompts([33])
    for numerics, num_cached in (("one", 0), ("other", 0), ("one", 32)):
        engine = make_engine(make_model("llama"))
        engine.cache.numerics = numerics
        with KVStore(config, metadata_of(engine.cache, "m")) as store:
            engine.use_store(store)
            assert engine.generate([prompt], PARAMS)[0].num_cached_tokens == num_cached
            engine.close()


def test_codecs_that_lose_bits_are_refused() -> None:
    engine = make_engine(make_model("llama").to(torch.bfloat16))
    config = KVStoreConfig(8, ("memory://?size=8MiB",), codec="fp8")
    with KVStore(config, metadata_of(engine.cache, "m")) as store, pytest.raises(ValueError, match="must be lossless"):
        engine.use_store(store)


def test_requests_that_fork_are_in_the_lives() -> None:
    asked = requests(random.Random(0), 40, 190)
    assert {one.params.n or 1 for one in asked} >= {1, 2, 3}
    assert any(one.params.is_greedy for one in asked)
    assert live(make_engine(make_model("llama")), [], random.Random(0)) == []

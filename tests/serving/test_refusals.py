"""What Engine and KVPageCachePool cannot take is refused with what to do instead."""

from collections.abc import Callable

import pytest
import torch
import transformers as tf
from support.models import COMMON, VOCAB, make_model

from kvpage import CacheConfig
from kvpage.serving import (
    BeamSearchParams,
    Branches,
    Engine,
    EngineConfig,
    KVPageCache,
    KVPageCachePool,
    SamplingParams,
)

CONFIG = CacheConfig(block_size=4, num_gpu_blocks=64)
PARAMS = SamplingParams(max_tokens=2)


def make_engine(model: object, cache_config: CacheConfig) -> Engine:
    return Engine.from_model(model, EngineConfig(cache_config))


MAKE = pytest.mark.parametrize("make", [make_engine, KVPageCachePool.from_model])


@MAKE
@pytest.mark.parametrize(
    "model, message",
    [
        ("gpt2", r"the name 'gpt2': load it, as transformers.AutoModelForCausalLM.from_pretrained\('gpt2'\)"),
        (None, "model must be a PreTrainedModel of transformers, got NoneType"),
        (tf.LlamaForCausalLM, "model must be a PreTrainedModel of transformers, got type"),
        (torch.nn.Linear(2, 2), "model must be a PreTrainedModel of transformers, got Linear"),
    ],
)
def test_what_is_no_model(make: Callable[..., object], model: object, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make(model, CONFIG)


@MAKE
def test_compiled_models(make: Callable[..., object]) -> None:
    """Nothing is compiled for it: that would take minutes, at each new shape of a batch."""
    model = make_model("llama")
    with pytest.raises(ValueError, match="model must not be compiled.* it is compiled_model._orig_mod"):
        make(torch.compile(model), CONFIG)
    make(torch.compile(model)._orig_mod, CONFIG)
    model.compile()
    with pytest.raises(ValueError, match=r"load this LlamaForCausalLM again, without a call of its compile\(\)"):
        make(model, CONFIG)


@MAKE
def test_scripted_modules(make: Callable[..., object]) -> None:
    model = make_model("llama")
    layer = model.model.layers[0]
    layer.mlp = torch.jit.trace(layer.mlp, torch.randn(1, model.config.hidden_size))
    with pytest.raises(TypeError, match=r"model must not hold a ScriptModule, model.layers.0.mlp is a .*Traced"):
        make(model, CONFIG)


@MAKE
@pytest.mark.parametrize("num_bytes", [0, 8])
@pytest.mark.parametrize(
    "name", ["model.norm.weight", "model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"]
)
def test_weights_without_memory(make: Callable[..., object], name: str, num_bytes: int) -> None:
    """Torch reads past the end of some, which ends the process."""
    model = make_model("llama", tie_word_embeddings=False)
    weight = model.get_parameter(name)
    needed = weight.numel() * 4
    weight.untyped_storage().resize_(num_bytes)
    with pytest.raises(ValueError, match=f"memory for its weights, {name} needs {needed} bytes and has {num_bytes}:"):
        make(model, CONFIG)


def test_a_norm_whose_memory_is_taken_away_later(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model("llama")
    engine = make_engine(model, CONFIG)
    model.model.norm.weight.untyped_storage().resize_(0)
    assert engine.generate([[1, 2, 3]], PARAMS)[0].finish_reason == "error"
    assert "weight must have memory for its elements" in caplog.text


def test_a_model_on_a_gpu_that_has_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("qwen3")
    monkeypatch.setattr(type(model), "device", property(lambda model: torch.device("cuda", 0)))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    with pytest.raises(ValueError, match=r"device must be .* 8\.0 or later .*, got cuda:0, Tesla T4, of 7\.5"):
        make_engine(model, CacheConfig(4, 8, 0))


def test_a_model_in_autocast_is_tried_out_in_its_own_dtype() -> None:
    """It was refused, as its logits over blocks were those of another dtype."""
    with torch.autocast("cpu", torch.bfloat16):
        engine = make_engine(make_model("llama"), CONFIG)
        assert torch.is_autocast_enabled("cpu")
    want = make_engine(make_model("llama"), CONFIG).generate([[3, 5, 7, 9]], PARAMS)
    assert engine.generate([[3, 5, 7, 9]], PARAMS)[0].token_ids == want[0].token_ids


def test_text_for_token_ids() -> None:
    engine = Engine.from_model(make_model("llama"), EngineConfig(CONFIG))
    ids = r"tokenizer\(text\)\['input_ids'\]"
    text = f"tokens must be token ids, got the text .*: {ids} makes ids of it"
    for tokens in ("hello " * 50, ["hello", "world"], b"hello"):
        for call in (
            lambda tokens=tokens: engine.add_request(tokens, PARAMS),
            lambda tokens=tokens: engine.stream(tokens, PARAMS),
            lambda tokens=tokens: engine.generate([[1, 2], tokens], PARAMS),
            lambda tokens=tokens: engine.beam_search([tokens], BeamSearchParams()),
            lambda tokens=tokens: Branches(engine).start(tokens),
        ):
            with pytest.raises(TypeError, match=text) as error:
                call()
            assert len(str(error.value)) < 150
    encoding = tf.BatchEncoding({"input_ids": [1, 2]})
    with pytest.raises(
        TypeError, match="tokens must be token ids, got a BatchEncoding: take the row of its 'input_ids'"
    ):
        engine.add_request(encoding, PARAMS)
    for call in (
        lambda prompts: engine.generate(prompts, PARAMS),
        lambda prompts: engine.beam_search(prompts, BeamSearchParams()),
    ):
        with pytest.raises(TypeError, match=rf"prompts must be several, .* got one text: give \[{ids}\]"):
            call("hello")
        with pytest.raises(TypeError, match="prompts must be several, .* got the ids of one: put them into a list"):
            call([1, 2, 3])
    assert not engine.has_unfinished and engine.stats().num_used_blocks == 0


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_the_length_where_rotary_frequencies_change(kind: str) -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4} if kind == "longrope" else {"factor": 2.0}
    rope = {"rope_type": kind, "rope_theta": 1e4, "original_max_position_embeddings": 32, **factors}
    key = "rope_parameters" if hasattr(tf.LlamaConfig(), "rope_parameters") else "rope_scaling"
    fields = {**COMMON, "original_max_position_embeddings": 32, key: rope}
    config = tf.Phi3Config(**fields) if kind == "longrope" else tf.LlamaConfig(**fields)
    model = tf.AutoModelForCausalLM.from_config(config).eval()
    reason = rf"embedding \({kind}\) has other frequencies beyond 32 tokens, .* need model.generate with a cache of"
    with pytest.raises(
        ValueError, match=rf"max_model_len must be in \[1, 32\] for this model, got 100; its .*{reason}"
    ):
        Engine.from_model(model, EngineConfig(CONFIG, max_model_len=100))
    engine = Engine.from_model(model, EngineConfig(CONFIG))
    engine.generate([[1] * 30], PARAMS)
    with pytest.raises(ValueError, match=rf"fit into max_model_len=32, got 31 \+ 2; its .*{reason}"):
        engine.add_request([1] * 31, PARAMS)
    held = Engine.from_model(model, EngineConfig(CONFIG, max_model_len=20))
    with pytest.raises(ValueError, match=r"fit into max_model_len=20, got 20 \+ 2$"):
        held.add_request([1] * 20, PARAMS)
    pool = KVPageCachePool.from_model(model, CONFIG)
    with pytest.raises(ValueError, match=rf"rows must have at most 32 tokens.* got 33; its .*{reason}"):
        pool.check_length(33)


@pytest.mark.parametrize("where", ["argument", "config"])
def test_generate_that_uses_no_cache(where: str) -> None:
    """It gives all tokens to each forward, which would go into the cache once more. MPT's config has it so."""
    model, ids = make_model("llama"), torch.tensor([[5, 6, 7, 8, 9]])
    options = {"max_new_tokens": 2, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    expected = model.generate(ids, **options)
    pool = KVPageCachePool.from_model(model, CONFIG)
    with KVPageCache(pool, ids) as cache:
        if where == "config":
            model.generation_config.use_cache = False
        else:
            options["use_cache"] = False
        with pytest.raises(ValueError, match=r"use_cache must be True with a cache of blocks, .*use_cache=True\)"):
            model.generate(ids, past_key_values=cache, **options)
        assert cache.get_seq_length() == 0
        assert torch.equal(model.generate(ids, past_key_values=cache, **{**options, "use_cache": True}), expected)
    pool.manager.check()
    assert pool.manager.stats().num_used_blocks == 0


SERVED_BY_POOL = {
    "bloom": lambda: tf.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4),
    "gptj": lambda: tf.GPTJConfig(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, rotary_dim=8, n_positions=256),
    "gpt_neo": lambda: tf.GPTNeoConfig(
        vocab_size=VOCAB, hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global"], 2]],
        max_position_embeddings=256,
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", SERVED_BY_POOL)
def test_a_family_that_the_pool_serves(kind: str) -> None:
    model = tf.AutoModelForCausalLM.from_config(SERVED_BY_POOL[kind]()).eval()
    if model._can_set_attn_implementation():
        pytest.skip("this version of transformers serves it through AttentionInterface")
    KVPageCachePool.from_model(model, CONFIG)
    with pytest.raises(ValueError, match="attention must go through .*KVPageCache serves this model, .*from_model"):
        Engine.from_model(model, EngineConfig(CONFIG))
    with pytest.raises(ValueError) as error:
        Engine.from_model(model, EngineConfig(CacheConfig(block_size=4, num_gpu_blocks=64, backend="mla")))
    assert "KVPageCache serves" not in str(error.value)


def test_a_family_that_nobody_serves() -> None:
    config = tf.RwkvConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2)
    with pytest.raises(ValueError, match="states must be in layers .* those of RwkvForCausalLM are elsewhere") as error:
        Engine.from_model(tf.AutoModelForCausalLM.from_config(config).eval(), EngineConfig(CONFIG))
    assert "KVPageCache" not in str(error.value)


def test_one_parameter_a_prompt() -> None:
    with pytest.raises(ValueError, match="params must be one, or one a prompt, got 2 for 3 prompts"):
        make_engine(make_model("llama"), CONFIG).generate([[1], [2], [3]], [PARAMS, PARAMS])

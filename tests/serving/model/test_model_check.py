"""Which models are served, and which are refused, by name and at load."""

import pytest
import torch
import transformers as tf
from support.models import COMMON, VOCAB, WINDOW, generate_each, make_model, make_prompts

from kvpage import CacheConfig
from kvpage.serving import Engine, EngineConfig, SamplingParams
from kvpage.serving.model.limits import max_model_len

CACHE = CacheConfig(block_size=4, num_gpu_blocks=64)
GPT = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4}
NOT_BY_THE_INTERFACE = "attention must go through transformers' AttentionInterface, that of {} does not"

REFUSED = {
    "FalconForCausalLM": (
        lambda: tf.FalconConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4),
        NOT_BY_THE_INTERFACE,
    ),
    "BloomForCausalLM": (
        lambda: tf.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4),
        NOT_BY_THE_INTERFACE,
    ),
    "MptForCausalLM": (
        lambda: tf.MptConfig(vocab_size=VOCAB, d_model=32, n_layers=2, n_heads=4),
        NOT_BY_THE_INTERFACE,
    ),
    "GPTJForCausalLM": (lambda: tf.GPTJConfig(**GPT, rotary_dim=4), NOT_BY_THE_INTERFACE),
    "PhimoeForCausalLM": (
        lambda: tf.PhimoeConfig(**COMMON, sliding_window=WINDOW, num_local_experts=4),
        "a sliding window must reach the attention function, {} has it only in its mask",
    ),
    "Llama4ForCausalLM": (
        lambda: tf.Llama4TextConfig(**COMMON, head_dim=8, num_local_experts=2, intermediate_size_mlp=32),
        "layers must be of attention, full_attention, sliding_attention, .*, {} has chunked_attention",
    ),
    "DiffLlamaForCausalLM": (
        lambda: tf.DiffLlamaConfig(**COMMON),
        r"layers \[0, 1, 2\] must each attend once over blocks, of {} it was ",
    ),
    "BertLMHeadModel": (
        lambda: tf.BertConfig(
            vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48
        ),
        "BertSelfAttention of layer 0 must be causal, is_causal is False",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_at_load(name: str) -> None:
    make_config, message = REFUSED[name]
    model = tf.AutoModelForCausalLM.from_config(make_config(), attn_implementation="eager").eval()
    assert type(model).__name__ == name
    if not model._can_set_attn_implementation():  # of some of these, transformers has changed that over time
        message = f"{message}|{NOT_BY_THE_INTERFACE}"
    elif message == NOT_BY_THE_INTERFACE:
        pytest.skip("this version of transformers hands its attention over")
    with pytest.raises(ValueError, match=message.replace("{}", name)):
        Engine.from_model(model, EngineConfig(CACHE))
    assert model.config._attn_implementation == "eager"


def test_an_encoder_and_decoder_is_refused() -> None:
    config = tf.T5Config(vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    with pytest.raises(ValueError, match="model must be a decoder only, T5ForConditionalGeneration has an encoder"):
        Engine.from_model(tf.T5ForConditionalGeneration(config).eval(), EngineConfig(CACHE))


def test_a_model_without_logits_is_refused() -> None:
    with pytest.raises(ValueError, match="model must give logits over its vocabulary, LlamaModel has no output emb"):
        Engine.from_model(make_model("llama").model, EngineConfig(CACHE))


def test_what_depends_on_the_place_in_the_row_is_refused() -> None:
    """As a state or a bias outside of attention does: packed sequences would see each other."""
    model = make_model("llama")
    model.model.embed_tokens.register_forward_hook(
        lambda module, args, output: output + 0.1 * torch.arange(output.shape[1])[None, :, None]
    )
    with pytest.raises(ValueError, match=r"logits over blocks must be the model's own, those of LlamaForCausalLM are"):
        Engine.from_model(model, EngineConfig(CACHE))
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("kind", ["StableLmConfig", "NemotronConfig"])
def test_models_that_drop_keywords_are_served(kind: str) -> None:
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(getattr(tf, kind)(**COMMON), attn_implementation="eager").eval()
    if not model._can_set_attn_implementation():
        pytest.skip(f"in this transformers, {type(model).__name__} does not go through AttentionInterface")
    check_tokens(model, min_distinct=10)


def test_layers_that_share_keys_and_values_are_served() -> None:
    """And layers whose head sizes differ."""
    if not hasattr(tf, "Gemma4TextConfig"):
        pytest.skip("this transformers has no Gemma4TextConfig")
    torch.manual_seed(0)
    config = tf.Gemma4TextConfig(
        **{**COMMON, "num_hidden_layers": 4}, head_dim=8, global_head_dim=16, num_kv_shared_layers=2,
        sliding_window=WINDOW, hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCAB,
        layer_types=["sliding_attention", "full_attention"] * 2, tie_word_embeddings=False,
    )  # fmt: skip
    model = tf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    check_tokens(model, min_distinct=10)


def check_tokens(model: tf.PreTrainedModel, min_distinct: int) -> None:
    prompts = make_prompts([5, 14, 3])
    expected = generate_each(model, prompts, 8)
    assert len({token for row in expected for token in row}) >= min_distinct
    engine = Engine.from_model(model, EngineConfig(CACHE, max_num_batched_tokens=9))
    outputs = engine.generate(prompts, SamplingParams(max_tokens=8))
    assert [output.token_ids for output in outputs] == expected


def test_a_model_left_in_our_implementation_says_so() -> None:
    model = make_model("llama")
    Engine.from_model(model, EngineConfig(CACHE))
    model.set_attn_implementation("kvpage")
    with pytest.raises(RuntimeError, match="LlamaAttention was called with the implementation 'kvpage' outside Engine"):
        model(torch.tensor([[1, 2, 3]]))


def test_rotary_embeddings_that_change_with_length_are_held_to_the_length_before() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0, "original_max_position_embeddings": 100}
    model = make_model("llama")
    assert max_model_len(model) == 256
    model.config.rope_parameters = rope
    model.config.rope_scaling = rope
    assert max_model_len(model) == 100

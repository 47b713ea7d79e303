"""Models whose sliding window is in transformers' cache alone are refused by KVPageCachePool; others are served."""

import pytest
import torch
import transformers as tf
from support.models import COMMON, WINDOW, make_model, make_prompts

from kvpage import CacheConfig
from kvpage.serving import Engine, EngineConfig, KVPageCachePool
from kvpage.serving.model.window_check import cache_windows

CONFIG = CacheConfig(block_size=4, num_gpu_blocks=64)
REASON = "a sliding window must be in the model's mask, {} leaves that of {} tokens to a cache that forgets"


def make_moshi(window: int) -> tf.PreTrainedModel:
    fields = {name: value for name, value in COMMON.items() if name != "intermediate_size"}
    config = tf.MoshiConfig(**fields, head_dim=8, ffn_dim=48, audio_vocab_size=16, sliding_window=window)
    torch.manual_seed(0)
    return tf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()


@pytest.mark.parametrize("window", [1, WINDOW, 3000])
def test_moshi_is_refused(window: int) -> None:
    model = make_moshi(window)
    for make, config in ((KVPageCachePool.from_model, CONFIG), (Engine.from_model, EngineConfig(CONFIG))):
        with pytest.raises(ValueError, match="a sliding window must") as error:
            make(model, config)
        assert "KVPageCache serves" not in str(error.value)
    with pytest.raises(ValueError, match=REASON.format("MoshiForCausalLM", window)):
        KVPageCachePool.from_model(model, CONFIG)


def test_the_reason_holds() -> None:
    """What transformers' own caches make of it: they disagree where one forgets and the other does not."""
    model, ids = make_moshi(WINDOW), torch.tensor(make_prompts([3 * WINDOW]))
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    forgetting = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, past_key_values=tf.DynamicCache(config=model.config), **options), forgetting)
    assert not torch.equal(model.generate(ids, past_key_values=tf.DynamicCache(), **options), forgetting)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", ["mistral", "gemma2", "gemma3", "gpt_oss", "phi3"])
def test_windows_in_the_mask(kind: str, attention: str) -> None:
    model = make_model(kind)
    if attention == "sdpa" and not model._supports_sdpa:
        pytest.skip(f"transformers has no sdpa for {kind}")
    model.set_attn_implementation(attention)
    assert set(cache_windows(model).values()) == {WINDOW}
    KVPageCachePool.from_model(model, CONFIG)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [1, 2, WINDOW, 1000])
def test_a_window_that_only_the_config_knows(window: int, dtype: torch.dtype, attention: str) -> None:
    """Llama looks at no window; the cache that `generate` makes for such a config keeps to it."""
    model = make_model("llama", sliding_window=window).to(dtype)
    model.set_attn_implementation(attention)
    with pytest.raises(ValueError, match=REASON.format("LlamaForCausalLM", window)):
        KVPageCachePool.from_model(model, CONFIG)


def test_a_window_that_no_row_can_leave() -> None:
    """Beyond 32 tokens its rotary embedding would change: rows are refused there."""
    model = make_model("llama", sliding_window=32)
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "original_max_position_embeddings": 32, "factor": 2.0}
    model.config.rope_parameters = model.config.rope_scaling = rope
    pool = KVPageCachePool.from_model(model, CONFIG)
    with pytest.raises(ValueError, match="rows must have at most 32 tokens"):
        pool.check_length(33)

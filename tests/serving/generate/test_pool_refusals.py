"""KVPageCachePool refuses models and configurations that it cannot serve."""

import pytest
import torch
import transformers as tf
from support.generate_pools import B, check_drained, hands_latents, has_hooks, make_pool, model_of, rows_of
from support.models import COMMON, make_model

from kvpage import CacheConfig
from kvpage.serving import KVPageCache, KVPageCachePool


def test_models_whose_state_is_not_all_in_k_and_v() -> None:
    sizes = {**COMMON, "num_hidden_layers": 2}
    refused = {
        "encoder": tf.T5Config(vocab_size=99, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=4),
        "only be called on Attention layers": tf.JambaConfig(**sizes, num_experts=2, use_mamba_kernels=False),
        "(forward must take past_key_values|states must be in the cache, beside K and V).* of Mamba": tf.MambaConfig(
            vocab_size=99, hidden_size=16, num_hidden_layers=1, state_size=4
        ),
    }
    for message, config in refused.items():
        auto = tf.AutoModelForSeq2SeqLM if config.is_encoder_decoder else tf.AutoModelForCausalLM
        model = auto.from_config(config).eval()
        with pytest.raises(ValueError, match=message):
            KVPageCachePool.from_model(model, CacheConfig(num_gpu_blocks=4))


def test_models_that_do_not_keep_to_their_cache() -> None:
    """Found out by computing: one with a state of its own, one that calls its cache twice."""
    config = CacheConfig(block_size=B, num_gpu_blocks=4)
    model = make_model("llama")
    hook = model.model.layers[0].register_forward_hook(lambda module, args, out: running_sum(out))
    with pytest.raises(
        ValueError, match="logits over blocks of torch.float32 must be the model's own, those of LlamaForCausalLM are"
    ):
        KVPageCachePool.from_model(model, config)
    hook.remove()
    assert not has_hooks(model)
    model.model.layers[1].self_attn.layer_idx = 0
    with pytest.raises(ValueError, match=r"each layer must write to its cache once, those of .* \[0, 0, 2\]"):
        KVPageCachePool.from_model(model, config)


def running_sum(out: torch.Tensor | tuple) -> torch.Tensor | tuple:
    """Each token sees the hidden states of those before it, but only within one forward."""
    if isinstance(out, tuple):
        return (out[0].cumsum(dim=1), *out[1:])
    return out.cumsum(dim=1)


def test_configurations_that_do_not_fit() -> None:
    model = model_of("llama")
    with pytest.raises(TypeError, match="cache_config must be a CacheConfig, got dict"):
        KVPageCachePool.from_model(model, {})
    with pytest.raises(ValueError, match="num_gpu_blocks must be positive, got 0"):
        KVPageCachePool.from_model(model, CacheConfig())
    with pytest.raises(ValueError, match="backend must be 'mla' exactly where .* K and V of heads to 'mla'"):
        KVPageCachePool.from_model(model, CacheConfig(num_gpu_blocks=4, backend="mla"))
    if hands_latents("deepseek_v3"):
        with pytest.raises(ValueError, match="backend must be 'mla' exactly where .* latents to 'flash'"):
            KVPageCachePool.from_model(model_of("deepseek_v3"), CacheConfig(num_gpu_blocks=4))
    with pytest.raises(ValueError, match="model must be in eval mode, LlamaForCausalLM is in training mode"):
        KVPageCachePool.from_model(make_model("llama").train(), CacheConfig(num_gpu_blocks=4))
    assert not has_hooks(model)


def test_tensors_that_hold_no_numbers_are_refused() -> None:
    pool, ids = make_pool("llama"), rows_of([1, 2, 3])
    mask = torch.ones_like(ids)
    mask.untyped_storage().resize_(0)
    for wrong in (mask, torch.ones(1, 3, device="meta"), object()):
        with pytest.raises((TypeError, ValueError)):
            KVPageCache(pool, ids, wrong)
    with KVPageCache(pool, ids) as cache:
        for wrong in (1.5, [0], torch.tensor([0.0]), torch.tensor([0], device="meta")):
            with pytest.raises((TypeError, ValueError)):
                cache.reorder_cache(wrong)
            with pytest.raises((TypeError, ValueError)):
                cache.batch_select_indices(object() if wrong == [0] else wrong)  # lists are what tensors take, too
        with pytest.raises(ValueError, match="repeats must be at most"):
            cache.batch_repeat_interleave(10**9)
    check_drained(pool)


def test_a_model_that_takes_one_token_after_the_other() -> None:
    """As ProphetNet does, which asserts it."""
    model = make_model("llama")

    def check(module: torch.nn.Module, args: object, kwargs: dict) -> None:
        cache = next((kwargs[name] for name in ("cache", "past_key_values") if kwargs.get(name) is not None), None)
        assert cache is None or not cache.get_seq_length() or kwargs["input_ids"].shape[1] == 1, "one token at a time"

    hook = model.register_forward_pre_hook(check, with_kwargs=True)
    with pytest.raises(ValueError, match="model must take several tokens after .* LlamaForCausalLM does not: one tok"):
        KVPageCachePool.from_model(model, CacheConfig(block_size=B, num_gpu_blocks=4))
    hook.remove()

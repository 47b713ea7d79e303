"""The methods of a KVPageCache, called by hand, and models of other forms."""

import inspect

import pytest
import torch
import transformers as tf
from support.generate_pools import NEW, B, check_drained, generate, logits_of, make_pool, model_of, rows_of
from support.models import COMMON, CONFIGS, VOCAB, make_prompts

from kvpage import CacheConfig
from kvpage.serving import KVPageCache, KVPageCachePool


def test_crop_by_hand_then_other_tokens() -> None:
    """Zero and a positive number mean what transformers' own caches take them for, or took."""
    pool, (prompt, other) = make_pool("llama"), make_prompts([4 * B, B])
    takes_length = "max_length" in inspect.signature(tf.DynamicCache.crop).parameters
    for argument, left in (
        (-1, 4 * B - 1),
        (-B, 3 * B),
        (B + 1, B + 1),
        (-9 * B, 0),
        (0, 0 if takes_length else 4 * B),
    ):
        with KVPageCache(pool, rows_of(prompt), namespace=bytes([left])) as cache:
            logits_of("llama", rows_of(prompt), cache)
            cache.crop(argument)
            assert cache.get_seq_length() == left
            found = logits_of("llama", rows_of(other), cache)
        expected = logits_of("llama", rows_of(prompt[:left] + other))[:, left:]
        assert torch.allclose(found, expected, atol=1e-5)
    check_drained(pool)


def test_rows_repeated_selected_and_reordered() -> None:
    pool, prompts = make_pool("llama"), make_prompts([2 * B + 1] * 2)
    with KVPageCache(pool, rows_of(*prompts)) as cache:
        logits_of("llama", rows_of(*prompts), cache)
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([3, 0, 1]))
        cache.batch_select_indices(torch.tensor([True, True, False]))
        cache.reorder_cache(torch.tensor([1, 0]))
        next_tokens = rows_of([5, 6], [7, 8])
        found = logits_of("llama", next_tokens, cache)
    expected = logits_of("llama", torch.cat([rows_of(*prompts), next_tokens], dim=1))[:, -2:]
    assert torch.allclose(found, expected, atol=1e-5)
    check_drained(pool)


def test_reset_begins_anew_with_any_rows() -> None:
    pool, prompts = make_pool("llama"), make_prompts([2 * B + 1] * 3)
    with KVPageCache(pool, rows_of(prompts[0])) as cache:
        logits_of("llama", rows_of(prompts[0]), cache)
        cache.reset()
        assert cache.get_seq_length() == 0
        ids = rows_of(*prompts)
        assert torch.equal(generate("llama", ids, cache), generate("llama", ids))
    check_drained(pool)


def test_layers_have_their_own_lengths_within_a_forward() -> None:
    """As in a DynamicCache: some models ask a layer for its length after they have updated it."""
    model, ids = model_of("llama"), rows_of(*make_prompts([2 * B + 1]))
    told: list[list[int]] = []
    pool = make_pool("llama")
    for cache in (tf.DynamicCache(), KVPageCache(pool, ids)):
        lengths: list[int] = []
        told.append(lengths)
        hooks = [
            layer.register_forward_hook(
                lambda *_, cache=cache, lengths=lengths: lengths.extend(cache.get_seq_length(i) for i in range(3))
            )
            for layer in model.model.layers
        ]
        for piece in ids.split(B, dim=1):
            logits_of("llama", piece, cache)
        for hook in hooks:
            hook.remove()
    cache.release()
    assert told[0] == told[1]


@pytest.mark.parametrize("make", ["opt", "bloom", "llava", "gemma3n"])
def test_models_of_other_forms(make: str) -> None:
    """OPT calls its decoder past the module between, Bloom has its own attention, Llava embeds tokens outside of its
    decoder, Gemma 3n shares K and V between layers.
    """
    model = FORMS[make]()
    pool = KVPageCachePool.from_model(model, CacheConfig(block_size=B, num_gpu_blocks=32))
    ids = rows_of(*make_prompts([3 * B + 1]))
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, **options)
    for found in (0, 3 * B):
        with KVPageCache(pool, ids) as cache:
            assert cache.get_seq_length() == found
            assert torch.equal(model.generate(ids, past_key_values=cache, **options), expected)
    if make != "llava" or int(tf.__version__.split(".")[0]) > 4:  # there it gives its decoder embeddings: refused
        with KVPageCache(pool, ids, namespace=b"past the hooks of the model itself") as cache, torch.no_grad():
            assert torch.allclose(model.forward(ids, past_key_values=cache).logits, model(ids).logits, atol=1e-4)
            assert cache.get_seq_length() == 3 * B + 1
    if make == "gemma3n":
        assert list(pool.layers) == [0, 1]
    if make == "llava":
        images = torch.zeros(1, 3, 8, 8)
        with KVPageCache(pool, ids, namespace=b"images") as cache, torch.no_grad():
            for name, value in (("pixel_values", images), ("image_sizes", [[8, 8]]), ("mm", {"image": (None, images)})):
                with pytest.raises(ValueError, match=f"takes text only, got {name}"):
                    model(ids, past_key_values=cache, **{name: value})
    check_drained(pool)


def make_opt() -> tf.PreTrainedModel:
    config = tf.OPTConfig(
        vocab_size=VOCAB, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4,
        word_embed_proj_dim=32, max_position_embeddings=256, init_std=0.3, pad_token_id=0, bos_token_id=1,
        eos_token_id=None,
    )  # fmt: skip
    return tf.AutoModelForCausalLM.from_config(config).eval()


def make_bloom() -> tf.PreTrainedModel:
    config = tf.BloomConfig(
        vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.3, pad_token_id=0, bos_token_id=1,
        eos_token_id=None,
    )  # fmt: skip
    return tf.AutoModelForCausalLM.from_config(config).eval()


def make_llava() -> tf.PreTrainedModel:
    vision = tf.CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4
    )
    config = tf.LlavaConfig(vision_config=vision, text_config=CONFIGS["llama"](), image_token_index=VOCAB - 1)
    return tf.LlavaForConditionalGeneration(config).eval()


def make_gemma3n() -> tf.PreTrainedModel:
    kinds = ["sliding_attention", "full_attention"]
    config = tf.Gemma3nTextConfig(
        **{**COMMON, "num_hidden_layers": 4}, head_dim=16, sliding_window=6, layer_types=kinds * 2,
        num_kv_shared_layers=2, activation_sparsity_pattern=[0.0] * 4, vocab_size_per_layer_input=VOCAB,
        hidden_size_per_layer_input=8, laurel_rank=4, altup_num_inputs=2,
    )  # fmt: skip
    return tf.AutoModelForCausalLM.from_config(config).eval()


FORMS = {"opt": make_opt, "bloom": make_bloom, "llava": make_llava, "gemma3n": make_gemma3n}


def test_lengths_that_it_tells() -> None:
    pool, ids = make_pool("llama"), rows_of(*make_prompts([2 * B + 1]))
    with KVPageCache(pool, ids) as cache:
        assert len(cache) == 3 and bool(cache)
        assert cache.get_mask_sizes(torch.arange(5), 0) == cache.get_mask_sizes(5, 0) == (5, 0)
        logits_of("llama", ids, cache)
        assert cache.get_mask_sizes(torch.arange(5), 2) == cache.get_mask_sizes(5, 2) == (2 * B + 6, 0)
        assert cache.get_max_length() == cache.get_max_cache_shape() == -1
        assert (cache.is_initialized, cache.is_compileable, cache.is_croppable) == (True, False, True)
        assert cache.is_sliding == cache.is_linear == cache.is_dummy == [False] * 3
        assert repr(cache) == f"KVPageCache(1 rows of {2 * B + 1} tokens)"

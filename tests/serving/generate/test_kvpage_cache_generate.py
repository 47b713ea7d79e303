"""The ways of `model.generate` over a KVPageCache: beams, samples, chunks of a prefill, assisted, conversations."""

import pytest
import torch
import transformers as tf
from support.generate_pools import (
    KINDS,
    B,
    check_drained,
    count_calls,
    counted,
    generate,
    has_hooks,
    make_pool,
    model_of,
    padded,
    rows_of,
)
from support.models import VOCAB, make_prompts

from kvpage import CacheConfig, KVScales
from kvpage.serving import KVPageCache, KVPageCachePool


@pytest.mark.parametrize("kind", KINDS)
def test_beams(kind: str) -> None:
    pool, ids = make_pool(kind, 96), rows_of(*make_prompts([2 * B + 1] * 2, seed=5))
    expected = generate(kind, ids, num_beams=3, num_return_sequences=2)
    for found in (0, 2 * B):
        with KVPageCache(pool, ids) as cache:
            assert cache.get_seq_length() == found
            assert torch.equal(generate(kind, ids, cache, num_beams=3, num_return_sequences=2), expected)
    check_drained(pool)


def test_beams_with_padding() -> None:
    pool = make_pool("llama", 96)
    ids, mask = padded(make_prompts([B + 1, 3 * B], seed=6))
    expected = generate("llama", ids, attention_mask=mask, num_beams=3)
    with KVPageCache(pool, ids, mask) as cache:
        assert torch.equal(generate("llama", ids, cache, attention_mask=mask, num_beams=3), expected)
    check_drained(pool)


def test_beams_share_blocks() -> None:
    """Four beams of a long prompt fit into blocks that two copies of it would not."""
    ids = rows_of(*make_prompts([10 * B], seed=7))
    pool = make_pool("llama", 26)
    with KVPageCache(pool, ids) as cache:
        generate("llama", ids, cache, max_new_tokens=2)
    expected = generate("llama", ids, num_beams=4)
    with KVPageCache(pool, ids) as cache:
        assert torch.equal(generate("llama", ids, cache, num_beams=4), expected)
    check_drained(pool)


@pytest.mark.parametrize("options", [{}, {"num_return_sequences": 3}, {"num_beams": 2}], ids=str)
def test_sampling_with_a_seed(options: dict[str, int]) -> None:
    pool, ids = make_pool("qwen3"), rows_of(*make_prompts([2 * B + 1]))
    expected = generate("qwen3", ids, do_sample=True, **options)
    for _ in range(2):
        with KVPageCache(pool, ids) as cache:
            assert torch.equal(generate("qwen3", ids, cache, do_sample=True, **options), expected)
    check_drained(pool)


@pytest.mark.parametrize("kind", ["llama", "mistral", "deepseek_v3"])
def test_prefill_in_chunks(kind: str) -> None:
    pool, ids = make_pool(kind), rows_of(*make_prompts([5 * B + 2]))
    expected, is_right = generate(kind, ids), counts_places_right(kind, ids)
    with KVPageCache(pool, ids) as cache, counted(kind) as counts:
        if is_right:
            assert torch.equal(generate(kind, ids, cache, prefill_chunk_size=7), expected)
        else:
            with pytest.raises(ValueError, match="cache_position must show every token of a row in its place"):
                generate(kind, ids, cache, prefill_chunk_size=7)
    assert counts[:2] == [7, 7]
    with KVPageCache(pool, ids) as cache:
        assert cache.get_seq_length() >= 5 * B
        assert torch.equal(generate(kind, ids, cache), expected)
    check_drained(pool)


def counts_places_right(kind: str, ids: torch.Tensor) -> bool:
    """Whether this transformers puts tokens after a prefill in chunks where they belong; 5.0 leaves one place out."""
    places, own = [], tf.DynamicCache()

    def note(module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        given = kwargs.get("cache_position")
        places.append(given is None or int(given[0]) == own.get_seq_length())

    hook = model_of(kind).base_model.register_forward_pre_hook(note, with_kwargs=True)
    generate(kind, ids, own, prefill_chunk_size=7)
    hook.remove()
    return all(places)


@pytest.mark.parametrize("kind", ["llama", "gemma3", "deepseek_v3"])
def test_assisted_generation_crops(kind: str) -> None:
    pool = make_pool(kind)
    ids = rows_of(make_prompts([B])[0] * 3)
    expected = generate(kind, ids, eos_token_id=VOCAB - 1)
    for found in (0, 3 * B - 1):
        with KVPageCache(pool, ids) as cache:
            assert cache.get_seq_length() == found
            crops = count_calls(cache, "crop")
            tokens = generate(kind, ids, cache, prompt_lookup_num_tokens=3, eos_token_id=VOCAB - 1)
            assert torch.equal(tokens, expected)
            assert crops
    check_drained(pool)


@pytest.mark.parametrize("kind", KINDS)
def test_a_conversation_finds_prompt_and_answer(kind: str) -> None:
    pool = make_pool(kind)
    first, second = make_prompts([2 * B + 1, B + 1], seed=8)
    ids = rows_of(first)
    with KVPageCache(pool, ids) as cache:
        answer = generate(kind, ids, cache)[0].tolist()
    ids = rows_of(answer + second)
    expected = generate(kind, ids)
    with KVPageCache(pool, ids) as cache:
        assert cache.get_seq_length() == (len(answer) - 1) // B * B
        assert torch.equal(generate(kind, ids, cache), expected)
    check_drained(pool)


def test_several_calls_over_one_cache() -> None:
    pool = make_pool("llama")
    first, second = make_prompts([2 * B + 1, B + 1], seed=9)
    with KVPageCache(pool, rows_of(first)) as cache:
        answer = generate("llama", rows_of(first), cache)[0].tolist()
        ids = rows_of(answer + second)
        with counted("llama") as counts:
            out = generate("llama", ids, cache, num_return_sequences=2, do_sample=True)
        assert counts[0] == 2 * (len(second) + 1)
    assert torch.equal(out, generate("llama", ids, num_return_sequences=2, do_sample=True))
    check_drained(pool)


def test_what_was_evicted_comes_back_from_the_host() -> None:
    pool = make_pool("llama", 8, num_host_blocks=32)
    prompts = make_prompts([4 * B] * 4, seed=11)
    for _ in range(2):
        for prompt in prompts:
            ids = rows_of(prompt)
            with KVPageCache(pool, ids) as cache:
                assert torch.equal(generate("llama", ids, cache), generate("llama", ids))
        check_drained(pool)
    assert pool.manager.stats().space.promoted_blocks > 0


@pytest.mark.parametrize("cache_dtype", ["int8", "fp8_e4m3", "bf16"])
def test_caches_of_fewer_bits_are_near(cache_dtype: str) -> None:
    """The tokens are not promised to be the same; the logits are near, also after what was found."""
    model, ids = model_of("llama"), rows_of(*make_prompts([4 * B + 1]))
    pool = make_pool("llama", cache_dtype=cache_dtype)
    with torch.no_grad():
        expected = model(ids).logits[0, -1]
        for found in (0, 4 * B):
            with KVPageCache(pool, ids) as cache:
                assert cache.get_seq_length() == found
                for piece in ids[:, found:].split(B + 1, dim=1):
                    logits = model(piece, past_key_values=cache).logits[0, -1]
            error = (logits - expected).norm() / (expected - expected.mean()).norm()
            assert 0 < error < (0.05 if cache_dtype != "fp8_e4m3" else 0.3)
        # The model sees what is stored, from the first forward on: it matters not what was found.
        for pieces in ([4 * B + 1], [B, 3 * B + 1]):
            with KVPageCache(pool, ids, namespace=bytes([len(pieces)])) as cache:
                for piece in ids.split(pieces, dim=1):
                    own = model(piece, past_key_values=cache).logits[0, -1]
            assert torch.allclose(own, logits, atol=1e-4)
    check_drained(pool)


def test_scales_of_8_bit_floats() -> None:
    """Scales under which the elements fill the range, then ones that leave nothing of them."""
    model, ids = model_of("llama"), rows_of(*make_prompts([4 * B + 1]))
    config = CacheConfig(block_size=B, num_gpu_blocks=16, cache_dtype="fp8_e4m3")
    with torch.no_grad():
        expected = model(ids).logits[0, -1]
        pool = KVPageCachePool.from_model(model, config, kv_scales=[KVScales.of([0.02, 0.05], 0.03)] * 3)
        for found in (0, 4 * B):
            with KVPageCache(pool, ids) as cache:
                assert cache.get_seq_length() == found
                logits = model(ids[:, found:], past_key_values=cache).logits[0, -1]
            assert (logits - expected).norm() / (expected - expected.mean()).norm() < 0.3
    with pytest.raises(ValueError, match="logits over blocks of torch.float8_e4m3fn must be the model's own"):
        KVPageCachePool.from_model(model, config, kv_scales=[KVScales.of(1e-6, 1e6)] * 3)
    assert not has_hooks(model)

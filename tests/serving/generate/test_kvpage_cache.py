"""`model.generate` over a KVPageCache gives the tokens that it gives without, and computes only what was not found."""

import pytest
import torch
import transformers as tf
from support.generate_pools import (
    KINDS,
    LAYOUTS,
    NEW,
    B,
    check_drained,
    counted,
    generate,
    hands_latents,
    make_pool,
    model_of,
    padded,
    rows_of,
)
from support.insides import cached_rows
from support.models import make_prompts

from kvpage.serving import KVPageCache

# --- the same tokens --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_first_call_then_shared_beginnings_then_the_whole_prompt(kind: str) -> None:
    pool = make_pool(kind)
    shared, tail = make_prompts([3 * B + 1, B + 2], seed=1)
    different = set()
    for prompt, found in ((shared, 0), (shared + tail, 3 * B + 1), (shared[: B + 1], B), (shared + tail, 4 * B + 2)):
        ids = rows_of(prompt)
        expected = generate(kind, ids)
        with KVPageCache(pool, ids) as cache, counted(kind) as counts:
            assert cache.get_seq_length() == found
            assert torch.equal(generate(kind, ids, cache), expected)
            assert cache.get_seq_length() == len(prompt) + NEW - 1
        assert counts == [len(prompt) - found] + [1] * (NEW - 1)
        different.update(expected[0, len(prompt) :].tolist())
    assert len(different) > 10, "too few different tokens to tell right from wrong"
    check_drained(pool)


@pytest.mark.parametrize("length", [1, B - 1, B, B + 1, 2 * B, 5 * B])
def test_edges_of_a_block(length: int) -> None:
    pool, ids = make_pool("llama"), rows_of(*make_prompts([length]))
    expected = generate("llama", ids)
    for found in (0, length - 1):  # generated tokens have filled the last block
        with KVPageCache(pool, ids) as cache:
            assert cache.get_seq_length() == found
            assert torch.equal(generate("llama", ids, cache), expected)
    check_drained(pool)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(layout.values()))
def test_layouts(layout: dict[str, str]) -> None:
    pool, ids = make_pool("llama", **layout), rows_of(*make_prompts([3 * B + 2] * 2))
    expected = generate("llama", ids)
    for found in (0, 3 * B + 1):
        with KVPageCache(pool, ids) as cache:
            assert cache.get_seq_length() == found
            assert torch.equal(generate("llama", ids, cache), expected)
    check_drained(pool)


@pytest.mark.parametrize("kind", ["deepseek_v2", "deepseek_v3"])
def test_latents_lie_in_blocks_as_they_are(kind: str) -> None:
    pool, text = make_pool(kind), model_of(kind).config
    if hands_latents(kind):
        assert pool.engine.layout.backend == "mla"
        assert pool.engine.layout.head_size == text.kv_lora_rank + text.qk_rope_head_dim
    else:
        assert pool.engine.layout.num_kv_heads == text.num_attention_heads
    ids = rows_of(*make_prompts([B, B, B]))
    expected = generate(kind, ids, num_beams=2)
    with KVPageCache(pool, ids) as cache:
        assert torch.equal(generate(kind, ids, cache, num_beams=2), expected)
    check_drained(pool)


def test_what_forward_returns_and_what_blocks_hold_are_transformers_own() -> None:
    """Logits, and K and V of every layer bit by bit, against a DynamicCache."""
    model, ids = model_of("llama"), rows_of(*make_prompts([3 * B + 1]))
    pool, own = make_pool("llama"), tf.DynamicCache()
    with torch.no_grad(), KVPageCache(pool, ids) as cache:
        for piece in ids.split([B + 1, 1, 2 * B - 1], dim=1):
            expected = model(piece, past_key_values=own).logits
            assert torch.equal(model(piece, past_key_values=cache).logits, expected)
        length = cache.get_seq_length()
        cached_rows(cache).commit()  # the last block is not full: it would be written at the release
        table = pool.manager.block_tables([row.seq_id for row in cached_rows(cache)._rows])
        for layer, blocks in zip(own.layers, pool.engine.gpu_cache, strict=True):
            for part, rows in ((0, layer.keys), (1, layer.values)):
                held = blocks[part, table[0]].flatten(0, 1)[:length]
                assert torch.equal(held, rows[0].transpose(0, 1))


# --- batches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt2"])
def test_a_batch_begins_where_the_shortest_found_beginning_ends(kind: str) -> None:
    pool = make_pool(kind)
    long, short, fresh = make_prompts([5 * B + 1] * 3, seed=3)
    for ids in (rows_of(long), rows_of(short[: 2 * B])):
        with KVPageCache(pool, ids) as cache:
            generate(kind, ids, cache, max_new_tokens=2)
    ids = rows_of(long, short, long)
    expected = generate(kind, ids)
    with KVPageCache(pool, ids) as cache, counted(kind) as counts:
        assert cache.get_seq_length() == 2 * B
        assert torch.equal(generate(kind, ids, cache), expected)
    assert counts[0] == 3 * (3 * B + 1)
    ids = rows_of(long, fresh)
    with KVPageCache(pool, ids) as cache:
        assert cache.get_seq_length() == 0
        assert torch.equal(generate(kind, ids, cache), generate(kind, ids))
    check_drained(pool)


@pytest.mark.parametrize("kind", ["llama", "mistral", "gpt2", "deepseek_v3"])
@pytest.mark.parametrize("is_told", [True, False], ids=["mask", "no-mask"])
def test_padded_rows_neither_find_nor_are_found(kind: str, is_told: bool) -> None:
    pool = make_pool(kind)
    prompts = make_prompts([2 * B, 4 * B], seed=4)
    ids, mask = padded(prompts)
    expected = generate(kind, ids, attention_mask=mask)
    with KVPageCache(pool, ids, mask if is_told else None) as cache:
        assert torch.equal(generate(kind, ids, cache, attention_mask=mask), expected)
    # The padded row's ids as a prompt of its own, where 0 is a token like others.
    with KVPageCache(pool, ids[:1]) as cache:
        assert cache.get_seq_length() == 0
    with KVPageCache(pool, ids[1:]) as cache:  # the unpadded row is found
        assert cache.get_seq_length() == 4 * B - 1
    with KVPageCache(pool, ids, mask) as cache:
        assert cache.get_seq_length() == 0
        assert torch.equal(generate(kind, ids, cache, attention_mask=mask), expected)
    check_drained(pool)


def test_padding_leaves_nothing_behind() -> None:
    pool = make_pool("llama")
    ids, mask = padded([[5, 6, 7] * B, [9]])
    for beams in (1, 3):
        with KVPageCache(pool, ids[1:], mask[1:]) as cache:
            generate("llama", ids[1:], cache, attention_mask=mask[1:], num_beams=beams)
    assert pool.manager.tree.num_cached == 0
    check_drained(pool)


def test_namespaces() -> None:
    pool, ids = make_pool("llama"), rows_of(*make_prompts([3 * B]))
    with KVPageCache(pool, ids, namespace=b"one") as cache:
        generate("llama", ids, cache)
    for namespace, found in ((b"", 0), (b"two", 0), (b"one", 3 * B - 1)):
        with KVPageCache(pool, ids, namespace=namespace) as cache:
            assert cache.get_seq_length() == found

"""KVPageCache: `model.generate` with blocks underneath gives its own tokens, and computes no prefix twice."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from serving.models import make_model, make_prompts

from kvpage import CacheConfig, OutOfBlocks
from kvpage.serving import KVPageCache, KVPagePool

B = 4
MAX_TOKENS = 10
KINDS = ["llama", "qwen3", "mistral", "gemma3", "gpt2", "gpt_oss", "deepseek_v3"]


def make_pool(kind: str = "llama", num_blocks: int = 128, **fields: object) -> KVPagePool:
    """Blocks that hold NaN where nothing has been written."""
    options = {name: fields.pop(name) for name in ("share_parts", "enable_prefix_caching") if name in fields}
    config = CacheConfig(block_size=B, num_gpu_blocks=num_blocks, **fields)
    pool = KVPagePool.from_model(make_model(kind), config, **options)
    for layer in pool.engine.gpu_cache:
        layer.fill_(float("nan"))
    return pool


def batch(prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Left-padded, and the mask."""
    width = max(map(len, prompts))
    rows = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return rows, mask


def generate(pool: KVPagePool, rows: torch.Tensor, mask: torch.Tensor, cache: object, **options: object) -> list:
    options = {"max_new_tokens": MAX_TOKENS, "do_sample": False, "pad_token_id": 0} | options
    torch.manual_seed(5)
    return pool.model.generate(rows, attention_mask=mask, past_key_values=cache, **options)[:, rows.shape[1] :].tolist()


@contextmanager
def counted(pool: KVPagePool) -> Iterator[list[int]]:
    """How many positions each forward computes."""
    counts: list[int] = []
    handle = pool.model.register_forward_pre_hook(
        lambda module, args, kwargs: counts.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    yield counts
    handle.remove()


def check(pool: KVPagePool, prompts: list[list[int]], found: int, namespace: bytes = b"", **options: object) -> list:
    """The tokens are those without it, and only what was not found is computed."""
    rows, mask = batch(prompts)
    expected = generate(pool, rows, mask, None, **options)
    with counted(pool) as counts, KVPageCache(pool, rows, mask, namespace) as cache:
        assert cache.get_seq_length() == found
        assert generate(pool, rows, mask, cache, **options) == expected
        pool.manager.check()
    assert sum(counts[: -MAX_TOKENS + 1] if len(counts) >= MAX_TOKENS else counts) == rows.shape[1] - found
    pool.manager.check()
    assert pool.manager.stats().num_used_blocks == 0
    return expected


@pytest.mark.parametrize("kind", KINDS)
def test_calls_find_what_earlier_calls_computed(kind: str) -> None:
    pool = make_pool(kind)
    (stem,) = make_prompts([4 * B + 2])
    (answer,) = check(pool, [stem], 0)
    assert len(set(answer)) > 3
    check(pool, [stem], 4 * B + 1)  # of the last block a part: but for one token all of the prompt
    conversation = [*stem, *answer, 7, 8]
    num_written = len(stem) + MAX_TOKENS - 1
    assert num_written % B == 3
    check(pool, [conversation], num_written // B * B)
    check(pool, [stem[: 2 * B] + [5]], 2 * B)
    check(pool, [stem], 0, namespace=b"other")


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3"])
@pytest.mark.parametrize(
    "layout",
    [
        {"backend": "flash", "kv_layout": "HND", "layer_layout": "packed"},
        {"backend": "flashinfer", "kv_layout": "NHD"},
        {"backend": "flashinfer", "kv_layout": "HND", "layer_layout": "packed"},
        {"backend": "paged"},
        {"block_size": 1},
    ],
    ids=str,
)
def test_layouts(kind: str, layout: dict) -> None:
    pool = make_pool(kind) if "block_size" in layout else make_pool(kind, **layout)
    assert pool.holds_latents == (pool.engine.layout.backend == "mla")
    (stem,) = make_prompts([3 * B + 1])
    check(pool, [stem], 0)
    check(pool, [[*stem, 3]], 3 * B + 1)


def test_latents_lie_in_blocks() -> None:
    """What DeepSeek's attention hands over differs between versions of transformers."""
    pool = make_pool("deepseek_v3")
    if pool.holds_latents:
        assert pool.engine.layout.head_size == 16 + 8 and pool.engine.layout.num_kv_heads == 1
    else:
        assert pool.engine.layout.num_kv_heads == 4


def test_batches_share_the_shortest_of_their_prefixes() -> None:
    pool = make_pool()
    first, second, third = make_prompts([4 * B, 4 * B, 4 * B])
    check(pool, [first, second], 0)
    check(pool, [first, second], 4 * B - 1)
    check(pool, [first, [*second[: B + 1], *third[: 3 * B - 1]]], B + 1)
    check(pool, [first, third], 0)
    check(pool, [first, first, first], 4 * B - 1)


def test_padded_rows_are_computed_and_found_by_nobody() -> None:
    pool = make_pool()
    long, short = make_prompts([4 * B, 2 * B + 1])
    check(pool, [long, short], 0)
    check(pool, [long], 4 * B - 1)  # the row without padding
    check(pool, [short], 0)
    check(pool, [[0] * (2 * B - 1) + short], 0)  # the padded row's ids, now as tokens
    rows, mask = batch([long, [0] * (2 * B - 1) + short])
    expected = generate(pool, *batch([long, short]), None)
    with KVPageCache(pool, rows) as cache:
        assert cache.get_seq_length() > 0
        with pytest.raises(ValueError, match="must be given to KVPageCache as they are to the model"):
            generate(pool, *batch([long, short]), cache)
    check(pool, [long, short], 0)
    assert expected == generate(pool, *batch([long, short]), None)


@pytest.mark.parametrize("num_prompts", [1, 2])
def test_beams(num_prompts: int) -> None:
    pool = make_pool()
    prompts = make_prompts([3 * B + 1, 3 * B + 1])[:num_prompts]
    check(pool, prompts, 0, num_beams=3)
    check(pool, prompts, 3 * B, num_beams=3)
    check(pool, prompts, 3 * B, num_beams=4, num_return_sequences=2, length_penalty=0.5)


@pytest.mark.parametrize("num_return_sequences", [1, 3])
def test_sampling(num_return_sequences: int) -> None:
    pool = make_pool()
    prompts = make_prompts([2 * B, 2 * B])
    options = {"do_sample": True, "num_return_sequences": num_return_sequences}
    check(pool, prompts, 0, **options)
    check(pool, prompts, 2 * B - 1, **options)


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_chunked_prefill(chunk: int) -> None:
    pool = make_pool()
    """Some versions of transformers compute all of the prompt in chunks, or go past the model's hooks."""
    prompts = make_prompts([5 * B, 5 * B + 3])
    for prompt in (prompts[0], prompts[1], prompts[0], [*prompts[0], 1, 2, 3]):
        rows, mask = batch([prompt])
        expected = generate(pool, rows, mask, None)
        with KVPageCache(pool, rows, mask) as cache:
            assert generate(pool, rows, mask, cache, prefill_chunk_size=chunk) == expected
        pool.manager.check()
    assert pool.manager.stats().num_used_blocks == 0


def test_a_forward_that_goes_past_the_hook_is_found_by_nobody() -> None:
    pool = make_pool()
    (prompt,) = make_prompts([3 * B])
    rows = torch.tensor([prompt])
    with KVPageCache(pool, rows) as cache, torch.no_grad():
        pool.model.forward(input_ids=rows[:, : 2 * B], past_key_values=cache, use_cache=True)
        pool.model(input_ids=rows[:, 2 * B :], past_key_values=cache, use_cache=True)
    check(pool, [prompt], 0)
    with KVPageCache(pool, rows) as cache, torch.no_grad():
        logits = pool.model.forward(input_ids=rows[:, -1:], past_key_values=cache, use_cache=True).logits
    torch.testing.assert_close(logits[0, -1], pool.model(input_ids=rows).logits[0, -1], rtol=1e-4, atol=1e-4)
    check(pool, [prompt], 3 * B - 1)


def test_assisted_generation_crops() -> None:
    pool = make_pool()
    assistant = make_model("llama", num_hidden_layers=1)
    (stem,) = make_prompts([3 * B + 2])
    rows, mask = batch([stem])
    expected = generate(pool, rows, mask, None)
    for found in (0, 3 * B + 1):
        with KVPageCache(pool, rows, mask) as cache:
            assert cache.get_seq_length() == found
            assert generate(pool, rows, mask, cache, assistant_model=assistant) == expected
            pool.manager.check()
    check(pool, [[*stem, *expected[0]]], (len(stem) + MAX_TOKENS - 1) // B * B)


def crop_to(cache: KVPageCache, length: int) -> None:
    cache.crop(length - cache.get_seq_length())


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("length", [1, B, 2 * B - 1, 3 * B, 3 * B + 1])
def test_crop_select_repeat_and_reset_by_hand(length: int, enable_prefix_caching: bool) -> None:
    pool = make_pool(enable_prefix_caching=enable_prefix_caching)
    rows, _ = batch(make_prompts([3 * B + 2, 3 * B + 2, 3 * B + 2]))

    def step(cache: KVPageCache, tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return pool.model(input_ids=tokens, past_key_values=cache, use_cache=True).logits[:, -1]

    def whole(tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return pool.model(input_ids=tokens).logits[:, -1]

    with KVPageCache(pool, rows) as cache:
        torch.testing.assert_close(step(cache, rows), whole(rows), rtol=1e-4, atol=1e-4)
        crop_to(cache, length)
        assert cache.get_seq_length() == length
        other = torch.tensor([[9, 10], [11, 12], [13, 14]])
        tokens = torch.cat([rows[:, :length], other], dim=1)
        torch.testing.assert_close(step(cache, other), whole(tokens), rtol=1e-4, atol=1e-4)
        pool.manager.check()
        cache.batch_select_indices(torch.tensor([2, 0]))
        cache.batch_repeat_interleave(2)
        tokens = torch.cat([tokens[[2, 2, 0, 0]], torch.tensor([[1], [2], [3], [3]])], dim=1)
        torch.testing.assert_close(step(cache, tokens[:, -1:]), whole(tokens), rtol=1e-4, atol=1e-4)
        pool.manager.check()
        cache.reset()
        assert cache.get_seq_length() == 0 and pool.manager.stats().num_used_blocks == 0
        torch.testing.assert_close(step(cache, rows), whole(rows), rtol=1e-4, atol=1e-4)
    with KVPageCache(pool, tokens) as cache:
        torch.testing.assert_close(
            step(cache, tokens[:, cache.get_seq_length() :]), whole(tokens), rtol=1e-4, atol=1e-4
        )
    assert pool.manager.stats().num_used_blocks == 0


def test_embeddings_and_positions_of_ones_own_are_found_by_nobody() -> None:
    pool = make_pool()
    rows, _ = batch(make_prompts([3 * B]))
    with torch.no_grad():
        with KVPageCache(pool, rows) as cache:
            pool.model(inputs_embeds=torch.randn(1, 3 * B, 32), past_key_values=cache, use_cache=True)
        with KVPageCache(pool, rows) as cache:
            assert cache.get_seq_length() == 0
            pool.model(input_ids=rows, position_ids=torch.arange(5, 5 + 3 * B)[None], past_key_values=cache)
        with KVPageCache(pool, rows) as cache:
            assert cache.get_seq_length() == 0
            pool.model(input_ids=rows, position_ids=torch.arange(3 * B)[None], past_key_values=cache)
        with KVPageCache(pool, rows) as cache:
            assert cache.get_seq_length() == 3 * B - 1


def test_too_few_blocks_and_failures_lose_nothing() -> None:
    pool = make_pool(num_blocks=6)
    (stem,) = make_prompts([4 * B])
    rows, mask = batch([stem])
    with KVPageCache(pool, rows, mask) as cache, pytest.raises(OutOfBlocks):
        generate(pool, rows, mask, cache, max_new_tokens=4 * B)
    pool.manager.check()
    assert pool.manager.stats().num_used_blocks == 0
    with pytest.raises(OutOfBlocks):
        KVPageCache(pool, torch.ones(2, 7 * B, dtype=torch.long))
    with KVPageCache(pool, rows, mask) as cache, pytest.raises(OutOfBlocks):
        generate(pool, rows, mask, cache, num_beams=8)
    assert pool.manager.stats().num_used_blocks == 0

    def fail(module: object, args: tuple) -> None:
        handle.remove()
        raise RuntimeError("boom")

    handle = pool.model.model.layers[1].register_forward_pre_hook(fail)
    other = make_prompts([2 * B], seed=4)
    with KVPageCache(pool, *batch(other)) as cache, pytest.raises(RuntimeError, match="boom"):
        generate(pool, *batch(other), cache)
    pool.manager.check()
    check(pool, other, 0)
    with KVPageCache(pool, rows, mask) as cache:
        assert generate(pool, rows, mask, cache, max_new_tokens=B) == generate(pool, rows, mask, None, max_new_tokens=B)


def test_a_cache_that_is_dropped_gives_its_blocks_back() -> None:
    pool = make_pool()
    rows, mask = batch(make_prompts([3 * B]))
    cache = KVPageCache(pool, rows, mask)
    generate(pool, rows, mask, cache)
    del cache
    gc.collect()
    assert pool.manager.stats().num_used_blocks > 0
    generate(pool, rows, mask, None)
    assert not pool.model._forward_pre_hooks
    with KVPageCache(pool, rows, mask) as cache:
        assert cache.get_seq_length() == 3 * B - 1
    assert pool.manager.stats().num_used_blocks == 0
    pool.manager.check()


def test_bad_arguments() -> None:
    pool = make_pool()
    rows, mask = batch(make_prompts([B, B]))
    for arguments, error, message in (
        ((rows[0],), ValueError, r"input_ids must be \[batch, length\], not empty, got shape \[4\]"),
        ((rows[:, :0],), ValueError, "not empty"),
        ((rows, mask[:, 1:]), ValueError, r"attention_mask must have the shape of input_ids, \[2, 4\], got \[2, 3\]"),
        ((rows, mask, "tenant"), TypeError, "namespace must be bytes"),
        ((rows.float(),), ValueError, "must be integers"),
    ):
        with pytest.raises(error, match=message):
            KVPageCache(pool, *arguments)
    assert pool.manager.stats().num_used_blocks == 0 and not pool.model._forward_pre_hooks
    with KVPageCache(pool, rows, mask) as cache:
        with pytest.raises(ValueError, match="it has 2 rows for 3"):
            generate(pool, *batch(make_prompts([B, B, B])), cache)
        cache.close()
    with pytest.raises(ValueError, match="num_gpu_blocks must be positive"):
        KVPagePool.from_model(pool.model, CacheConfig())
    with pytest.raises(TypeError, match="cache_config must be a CacheConfig"):
        KVPagePool.from_model(pool.model, {"num_gpu_blocks": 4})


def test_quantised_blocks_run() -> None:
    config = CacheConfig(block_size=B, num_gpu_blocks=32, cache_dtype="int8")
    pool = KVPagePool.from_model(make_model("llama"), config)
    rows, mask = batch(make_prompts([3 * B]))
    tokens = []
    for found in (0, 3 * B - 1):
        with KVPageCache(pool, rows, mask) as cache:
            assert cache.get_seq_length() == found
            tokens.append(generate(pool, rows, mask, cache))
    assert tokens[0] == tokens[1]

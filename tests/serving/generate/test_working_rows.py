"""K and V in one piece beside the blocks: nothing is gathered that was computed here, and blocks are written whole."""

import gc

import pytest
import torch
from support.generate_pools import NEW, B, generate, make_pool
from support.models import generate_each, make_model, make_prompts

from kvpage import CacheConfig, ops
from kvpage.serving import KVPageCache, KVPageCachePool

PROMPTS = make_prompts([3 * B + 1, 3 * B + 1], seed=7)
LLAMA_TOKEN = 3 * 2 * 2 * 8 * 4  # layers, K and V, heads, size, bytes


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    counts = {"gather_cache": 0, "reshape_and_cache": 0}
    for name in counts:

        def count(*args: object, name: str = name, own: object = getattr(ops, name), **kwargs: object) -> object:
            counts[name] += 1
            return own(*args, **kwargs)

        monkeypatch.setattr(ops, name, count)
    return counts


def test_a_step_gathers_nothing_and_a_block_is_written_at_once(calls: dict[str, int]) -> None:
    pool = make_pool("llama")
    ids = torch.tensor(PROMPTS[:1])
    for num_gathered in (0, 1):
        calls.update(dict.fromkeys(calls, 0))
        with KVPageCache(pool, ids) as cache:
            found = cache.get_seq_length()
            expected = generate("llama", ids)
            assert torch.equal(generate("llama", ids, cache), expected)
            num_blocks = (cache.get_seq_length() - 1) // B - max(found // B, (ids.shape[1] - 1) // B - 1)
        assert calls["gather_cache"] == 3 * num_gathered
        assert calls["reshape_and_cache"] <= 3 * (num_blocks + 1)


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("max_working_bytes", [None, 0, 100 * LLAMA_TOKEN, 180 * LLAMA_TOKEN])
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}], ids=str)
def test_with_more_memory_or_less(kind: str, max_working_bytes: int | None, options: dict[str, int]) -> None:
    """Some limits are reached by the prompt already, some by the answer, some by the second cache alone."""
    pool = make_pool(kind, max_working_bytes=max_working_bytes)
    for prompt in (*PROMPTS, PROMPTS[0] + [5] * 60, PROMPTS[0] + [5] * 60):
        ids = torch.tensor([prompt])
        expected = generate(kind, ids, **options)
        with KVPageCache(pool, ids) as cache, KVPageCache(pool, torch.tensor([PROMPTS[0]])) as other:
            generate(kind, torch.tensor([PROMPTS[0]]), other)
            assert torch.equal(generate(kind, ids, cache, **options), expected)
        limit = float("inf") if max_working_bytes is None else max_working_bytes
        assert pool.working_memory.num_bytes == 0 <= limit
    pool.manager.check()
    assert pool.manager.stats().num_used_blocks == 0


def test_memory_that_runs_out_amid_an_answer() -> None:
    """What was in one piece goes into blocks, is gathered from then on, and can be found."""
    room = len(PROMPTS[0]) + 64  # what the prompt takes; one token more asks for more
    pool = make_pool("llama", max_working_bytes=room * LLAMA_TOKEN)
    ids = torch.tensor(PROMPTS[:1])
    expected = generate("llama", ids, max_new_tokens=90)
    for found in (0, len(PROMPTS[0]) - 1):
        with KVPageCache(pool, ids) as cache:
            assert cache.get_seq_length() == found
            assert torch.equal(generate("llama", ids, cache, max_new_tokens=90), expected)
            assert pool.working_memory.num_bytes == 0
    with KVPageCache(pool, expected) as again:
        assert again.get_seq_length() >= (expected.shape[1] - 1) // B * B


def test_memory_is_counted_and_given_back() -> None:
    pool = make_pool("llama")
    ids = torch.tensor(PROMPTS)
    num_bytes = 2 * (ids.shape[1] + 64) * LLAMA_TOKEN
    with KVPageCache(pool, ids) as cache:
        assert pool.working_memory.num_bytes == 0
        generate("llama", ids, cache)
        assert pool.working_memory.num_bytes == num_bytes
        cache.batch_select_indices([1])
        assert pool.working_memory.num_bytes == 0
    cache = KVPageCache(pool, ids)
    generate("llama", ids, cache)
    del cache
    gc.collect()
    assert pool.working_memory.num_bytes == num_bytes  # a forgotten one's, until the next is made
    with KVPageCache(pool, ids):
        assert pool.working_memory.num_bytes == 0


@pytest.mark.parametrize("max_working_bytes", [None, 0])
def test_what_is_computed_is_found_when_the_next_step_begins(max_working_bytes: int | None) -> None:
    pool = make_pool("llama", max_working_bytes=max_working_bytes)
    row = PROMPTS[0]
    with KVPageCache(pool, torch.tensor([row])) as cache, torch.no_grad():
        for begin in range(0, 3 * B, B):
            pool.model(torch.tensor([row[begin : begin + B]]), past_key_values=cache)
            with KVPageCache(pool, torch.tensor([row])) as other:
                assert other.get_seq_length() == begin
        pool.model(torch.tensor([row[3 * B :]]), past_key_values=cache)
        with KVPageCache(pool, torch.tensor([row])) as other:
            assert other.get_seq_length() == 3 * B
            assert (
                generate("llama", torch.tensor([row]), other)[0, len(row) :].tolist()
                == generate_each(pool.model, [row], NEW)[0]
            )
    pool.manager.check()


@pytest.mark.parametrize("wrong", [-1, 0.5, "all"])
def test_limits_that_are_none(wrong: object) -> None:
    with pytest.raises((ValueError, TypeError), match="max_working_bytes must"):
        KVPageCachePool.from_model(
            make_model("llama"), CacheConfig(block_size=B, num_gpu_blocks=8), max_working_bytes=wrong
        )

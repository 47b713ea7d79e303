"""After weights have changed in place, nothing of before is found: the tokens are those of the model as it is now."""

from collections.abc import Callable

import pytest
import torch
from support.models import VOCAB, generate_each, make_model, make_prompts

from kvpage import BlockManager, CacheConfig
from kvpage.blend import BlendConfig, MemorySegments
from kvpage.serving import (
    Branches,
    Engine,
    EngineConfig,
    KVPageCache,
    KVPageCachePool,
    PagedTokenTrie,
    SamplingParams,
    WeightsChanged,
)
from kvpage.store import KVStore, KVStoreConfig, metadata_of
from kvpage.store.tiers.memory_tier import MemoryTier

B, NUM_TOKENS = 4, 6
PARAMS = SamplingParams(max_tokens=NUM_TOKENS)
STEM = make_prompts([6 * B], seed=1)[0]
PROMPTS = [STEM + tail for tail in make_prompts([1, B - 1, B + 1, 2 * B], seed=2)]


def change(model: torch.nn.Module) -> None:
    """Other weights, in place."""
    torch.manual_seed(9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))


def make_engine(model: torch.nn.Module, num_blocks: int = 64, **fields: object) -> Engine:
    cache, segments = CacheConfig(B, num_blocks, fields.pop("num_cpu_blocks", 0)), fields.pop("segments", None)
    return Engine.from_model(model, EngineConfig(cache, **fields), segments=segments)


@pytest.mark.parametrize("num_blocks", [64, 12])
def test_nothing_is_found_in_either_tier(num_blocks: int) -> None:
    model = make_model("llama")
    engine = make_engine(model, num_blocks, num_cpu_blocks=64, load_or_compute=False, pin_quota=8)
    before = engine.generate(PROMPTS, PARAMS)
    pin = engine.manager.space.pin(STEM)
    change(model)
    with pytest.raises(WeightsChanged):
        engine.generate(PROMPTS, PARAMS)
    engine.reset_prefix_cache()
    assert (engine.manager.tree.num_cached, engine.manager.tree.num_host_cached) == (0, 0)
    engine.manager.check()
    found = engine.generate(PROMPTS, PARAMS)
    assert found[0].num_cached_tokens == 0
    assert [one.token_ids for one in found] == generate_each(model, PROMPTS, NUM_TOKENS)
    assert [one.token_ids for one in found] != [one.token_ids for one in before]
    engine.manager.space.unpin(pin)
    engine.reset_prefix_cache()
    engine.reset_prefix_cache()


@pytest.mark.parametrize("num_steps", [0, 1, 3, 7])
@pytest.mark.parametrize("num_blocks", [64, 14])
def test_requests_under_way_keep_their_tokens_and_nothing_else(num_steps: int, num_blocks: int) -> None:
    """Also those that are swapped out, and those amid their prompt. What follows is as from the tokens alone."""
    model = make_model("llama")
    engine = make_engine(model, num_blocks, num_cpu_blocks=20, max_num_batched_tokens=2 * B, load_or_compute=False)
    ids = [engine.add_request(prompt, PARAMS) for prompt in PROMPTS]
    steps = [one for _ in range(num_steps) for one in engine.step()]
    change(model)
    engine.reset_prefix_cache()
    engine.manager.check()
    assert engine.stats().num_used_blocks == 0 and engine.manager.tree.num_cached == 0
    tokens = {request_id: [one.token_id for one in steps if one.request_id == request_id] for request_id in ids}
    wanted = [
        old + generate_each(model, [prompt + old], NUM_TOKENS - len(old))[0] if len(old) < NUM_TOKENS else old
        for prompt, old in zip(PROMPTS, tokens.values(), strict=True)
    ]
    while engine.has_unfinished:
        for one in engine.step():
            tokens[one.request_id].append(one.token_id)
    assert list(tokens.values()) == wanted
    assert [one.token_ids for one in engine.generate(PROMPTS, PARAMS)] == generate_each(model, PROMPTS, NUM_TOKENS)


def test_a_store_is_waited_for_and_left_alone() -> None:
    model = make_model("llama")
    engine = make_engine(model)
    with KVStore(KVStoreConfig(B), metadata_of(engine.cache, "m"), [MemoryTier(1 << 20)]) as store:
        engine.use_store(store)
        engine.generate(PROMPTS, PARAMS)
        engine.reset_prefix_cache()
        assert engine.manager.tree.num_cached == 0 and engine.manager.tree.num_matches == 0
        assert engine.generate([PROMPTS[3]], PARAMS)[0].num_cached_tokens >= 6 * B  # out of the store, as documented
        engine.close()
    change(model)
    other = make_engine(model)
    with KVStore(KVStoreConfig(B), metadata_of(engine.cache, "m, changed"), [MemoryTier(1 << 20)]) as store:
        other.use_store(store)
        assert [one.token_ids for one in other.generate(PROMPTS, PARAMS)] == generate_each(model, PROMPTS, NUM_TOKENS)
        other.close()


def test_segments_in_host_memory_are_forgotten_and_those_found_for_requests_too() -> None:
    model, segments = make_model("llama"), MemorySegments(1 << 20)
    engine = make_engine(model, blend=BlendConfig(ratio=0.1), segments=segments, max_num_seqs=1)
    engine.warm_segments([STEM])
    prompts = [[index, 2, 3, *STEM, 5] for index in (7, 8)]
    ids = [engine.add_request(prompt, PARAMS, blend=True, segments=[3, len(STEM)]) for prompt in prompts]
    first = engine.step()
    change(model)
    engine.reset_prefix_cache()
    assert len(segments) == segments.num_bytes == 0
    outputs = {}
    while engine.has_unfinished:
        outputs |= {one.request_id: one.output for one in engine.step() if one.output}
    assert outputs[ids[0]].num_reused_tokens > 0 and outputs[ids[1]].num_reused_tokens == 0
    begun = [*prompts[0], first[0].token_id]
    assert outputs[ids[0]].token_ids[1:] == generate_each(model, [begun], NUM_TOKENS - 1)[0]
    assert outputs[ids[1]].token_ids == generate_each(model, [prompts[1]], NUM_TOKENS)[0]


def test_what_stands_in_its_way_changes_nothing() -> None:
    model = make_model("llama")
    engine = make_engine(model)
    (before,) = engine.generate([PROMPTS[0]], PARAMS)
    waiting = engine.add_request(PROMPTS[1], PARAMS)
    engine.step()
    with Branches(engine) as branches:
        branches.start(PROMPTS[0])
        with pytest.raises(RuntimeError, match="needs all Branches to be closed, 1 are live"):
            engine.reset_prefix_cache()
    assert engine.stats().num_running == 1
    with PagedTokenTrie(engine) as trie:
        trie.next_token_logprobs([PROMPTS[0]])
        with pytest.raises(RuntimeError, match="needs all Branches to be closed"):
            engine.reset_prefix_cache()
        trie.clear()
        assert engine.generate([PROMPTS[0]], PARAMS)[0].num_cached_tokens == 6 * B
        engine.reset_prefix_cache()

    def hook(module: torch.nn.Module, args: tuple) -> None:
        handle.remove()
        with pytest.raises(RuntimeError, match="reset_prefix_cache must not be called during a step"):
            engine.reset_prefix_cache()

    handle = model.model.layers[1].register_forward_pre_hook(hook)
    assert engine.generate([PROMPTS[0]], PARAMS)[0].token_ids == before.token_ids
    assert [one.request_id for one in engine.step() if one.output] == [waiting]


@pytest.mark.parametrize("end", [lambda cache: cache.release(), lambda cache: None])
def test_a_pool_of_kvpage_caches(end: Callable[[KVPageCache], None]) -> None:
    model = make_model("llama")
    pool = KVPageCachePool.from_model(model, CacheConfig(block_size=B, num_gpu_blocks=40, num_cpu_blocks=8))
    prompt = torch.tensor([PROMPTS[0]])
    options = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "pad_token_id": 0}
    cache = KVPageCache(pool, prompt)
    model.generate(prompt, past_key_values=cache, **options)
    with pytest.raises(RuntimeError, match="needs all sequences to be released, 1 are not"):
        pool.reset_prefix_cache()
    assert cache.get_seq_length() > 0
    end(cache)
    del cache
    change(model)
    pool.reset_prefix_cache()
    pool.manager.check()
    with KVPageCache(pool, prompt) as cache:
        assert cache.get_seq_length() == 0
        found = model.generate(prompt, past_key_values=cache, **options)
    assert found[0, len(PROMPTS[0]) :].tolist() == generate_each(model, [PROMPTS[0]], NUM_TOKENS)[0]


def test_a_manager_with_sequences_or_matches_refuses() -> None:
    manager = BlockManager(8, B, num_host_blocks=8, pin_quota=4)
    manager.reset_prefix_cache()
    manager.allocate("a", STEM[: 2 * B])
    manager.commit("a", STEM[: 2 * B])
    for change_state in (lambda: None, lambda: manager.swap_out("a")):
        change_state()
        with pytest.raises(RuntimeError, match="needs all sequences to be released, 1 are not"):
            manager.reset_prefix_cache()
    manager.release("a")
    handle = manager.space.pin(STEM[: 2 * B])
    match = manager.tree.match([*STEM[:B], VOCAB])
    with pytest.raises(RuntimeError, match="needs all matches to be released, 1 are not"):
        manager.reset_prefix_cache()
    assert manager.tree.num_cached == 2 and len(manager.space.pins) == 1
    manager.tree.release(match)
    manager.reset_prefix_cache()
    assert (manager.tree.num_cached, len(manager.space.pins), manager.num_free_blocks) == (0, 0, 8)
    manager.space.unpin(handle)
    manager.check()

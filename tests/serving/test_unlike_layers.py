"""Models whose layers have heads and sizes of their own, or share K and V: released ones scaled down, over blocks."""

import functools

import pytest
import torch
import transformers as tf
from support.family import make_family_model
from support.family_configs import num_released
from support.state_engines import greedy, own_tokens, random_prompt

from kvpage import CacheConfig
from kvpage.serving import Engine, EngineConfig, KVPageCache, KVPageCachePool
from kvpage.store import KVStore, KVStoreConfig, KVStoreMetadata, metadata_of

B = 4
NUM_TOKENS = 8
KINDS = ["gemma4_text", "gemma3n_text", "mimo_v2_flash"]
CASES = [(kind, released) for kind in KINDS for released in range(num_released(kind))]


@functools.cache
def model_of(kind: str, released: int) -> tf.PreTrainedModel:
    return make_family_model(kind, released=released)


def make_engine(model: tf.PreTrainedModel, num_blocks: int = 64, num_host_blocks: int = 0, **fields) -> Engine:
    """An engine whose free blocks are poisoned."""
    cache = CacheConfig(B, num_blocks, num_cpu_blocks=num_host_blocks)
    engine = Engine.from_model(model, EngineConfig(cache, **{"max_num_seqs": 4, "load_or_compute": False, **fields}))
    for layer in engine.cache.gpu_cache:
        layer.fill_(torch.nan)
    return engine


def answers(engine: Engine, prompts: list[list[int]]) -> list[tuple[list[int], int]]:
    outputs = engine.generate(prompts, greedy(NUM_TOKENS))
    engine.manager.check()
    return [(output.token_ids, output.num_cached_tokens) for output in outputs]


@pytest.mark.parametrize(("kind", "released"), CASES)
@pytest.mark.parametrize("num_batched_tokens", [7, 512])
def test_prompts_that_part_at_each_offset(kind: str, released: int, num_batched_tokens: int) -> None:
    model, common = model_of(kind, released), random_prompt(2 * B + 1)
    engine = make_engine(model, max_num_batched_tokens=num_batched_tokens)
    assert answers(engine, [common]) == [(own_tokens(model, common, NUM_TOKENS), 0)]
    for position in (1, B - 1, B, B + 1, 2 * B):
        prompt = [*common[:position], (common[position] + 1) % 90 + 1, 7, 9]
        assert answers(engine, [prompt]) == [(own_tokens(model, prompt, NUM_TOKENS), position)]


@pytest.mark.parametrize(("kind", "released"), CASES)
def test_preempted_requests_go_to_the_host_and_come_back(kind: str, released: int) -> None:
    model = model_of(kind, released)
    prompts = [random_prompt(length, length) for length in (B, 3 * B + 1, 4 * B, 2 * B + 3)]
    engine = make_engine(model, 9, 32, max_num_batched_tokens=11)
    assert [tokens for tokens, _ in answers(engine, prompts)] == [own_tokens(model, one, NUM_TOKENS) for one in prompts]
    assert engine.stats().num_swaps > 0


@pytest.mark.parametrize(("kind", "released"), CASES)
def test_a_second_engine_goes_on_from_a_store(kind: str, released: int) -> None:
    model, prompt = model_of(kind, released), random_prompt(4 * B + 2)
    expected = own_tokens(model, prompt, NUM_TOKENS)
    engine = make_engine(model)
    with KVStore(KVStoreConfig(2 * B, ("memory://?size=4MiB",)), metadata_of(engine.cache, "m")) as store:
        engine.use_store(store)
        assert answers(engine, [prompt]) == [(expected, 0)]
        engine.close()
        second = make_engine(model)
        second.use_store(store)
        assert answers(second, [prompt]) == [(expected, 4 * B)]
        second.close()


def test_a_store_whose_metadata_name_other_rows_is_refused_at_once() -> None:
    engine = make_engine(model_of("mimo_v2_flash", 0))
    metadata = KVStoreMetadata("m", kv_dtype=torch.float32)
    with KVStore(KVStoreConfig(2 * B, ("memory://?size=4MiB",)), metadata) as store:
        with pytest.raises(ValueError, match="row_layout of the store must be the engine's"):
            engine.use_store(store)
        assert answers(engine, [[1, 2, 3]])[0][1] == 0  # it serves on, without one


@pytest.mark.parametrize(("kind", "released"), CASES)
def test_generate_over_blocks(kind: str, released: int) -> None:
    model, prompt = model_of(kind, released), random_prompt(3 * B + 2)
    expected = own_tokens(model, prompt, NUM_TOKENS)
    pool = KVPageCachePool.from_model(model, CacheConfig(B, 64))
    input_ids = torch.tensor([prompt])
    for num_cached in (0, len(prompt) - 1):
        with KVPageCache(pool, input_ids) as cache:
            assert cache.get_seq_length() == num_cached
            tokens = model.generate(input_ids, past_key_values=cache, max_new_tokens=NUM_TOKENS, do_sample=False)
        assert tokens[0, len(prompt) :].tolist() == expected


@pytest.mark.parametrize(("kind", "released"), CASES)
def test_each_layer_takes_its_own_bytes(kind: str, released: int) -> None:
    """K and V of a forward of transformers tell the heads and sizes. A layer that shares those of another has none."""
    model = model_of(kind, released)
    cache = tf.DynamicCache()
    with torch.no_grad():
        model(torch.tensor([random_prompt(B)]), past_key_values=cache)
    layers = [layer for layer in cache.layers if layer.keys is not None and layer.keys.numel()]
    expected = sum(layer.keys.numel() + layer.values.numel() for layer in layers) * 4
    engine = make_engine(model, 10)
    assert len(engine.cache.gpu_cache) == len(layers)
    assert sum(layer.nbytes for layer in engine.cache.gpu_cache) == 10 * expected

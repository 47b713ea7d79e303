"""An engine with a KVStore: a second engine, or a second process on the same disk, starts warm with the same tokens."""

import pytest
import torch
from support.engines import PATIENCE
from support.insides import stack_of
from support.models import generate_each, make_model, make_prompts

from kvpage import CacheConfig
from kvpage.serving import Engine, EngineConfig, SamplingParams
from kvpage.store import KVStore, KVStoreConfig, metadata_of

B, C = 4, 8
MAX_TOKENS = 6
PARAMS = SamplingParams(max_tokens=MAX_TOKENS)
PROMPTS = make_prompts([5 * C + 3, 3 * C, C + 1, 3])


def make_engine(num_blocks: int = 128, kind: str = "llama", **fields: object) -> Engine:
    options = {name: fields.pop(name) for name in ("load_or_compute", "kv_scales") if name in fields}
    config = CacheConfig(block_size=B, num_gpu_blocks=num_blocks, **fields)
    return Engine.from_model(make_model(kind), EngineConfig(config, **{**PATIENCE, **options}))


def serve(engine: Engine, store: KVStore) -> tuple[list[list[int]], list[int]]:
    engine.use_store(store)
    outputs = engine.generate(PROMPTS, PARAMS)
    engine.close()
    engine.manager.check()
    return [output.token_ids for output in outputs], [output.num_cached_tokens for output in outputs]


@pytest.mark.parametrize("kind", ["llama", "mistral", "deepseek_v3"])
@pytest.mark.parametrize("layer_layout", ["separate", "packed"])
def test_a_second_process_starts_warm(tmp_path, kind: str, layer_layout: str) -> None:
    expected = generate_each(make_model(kind), PROMPTS, MAX_TOKENS)
    config = KVStoreConfig(C, (f"disk://{tmp_path}?size=16MiB&segment=8MiB",))
    for found in ([0, 0, 0, 0], [5 * C, 3 * C - B, C, 0]):
        engine = make_engine(kind=kind, layer_layout=layer_layout)
        with KVStore(config, metadata_of(engine.cache, kind)) as store:
            assert serve(engine, store) == (expected, found)
            assert store.stats().corrupt_records == 0


def test_what_is_being_stored_can_be_waited_for() -> None:
    engine = make_engine()
    assert engine.saves_under_way() == []
    with KVStore(KVStoreConfig(C, ("memory://?size=4MiB",)), metadata_of(engine.cache, "m")) as store:
        engine.use_store(store)
        engine.add_request(PROMPTS[0], SamplingParams(max_tokens=1))
        assert engine.saves_under_way() == []
        engine.step()
        (save,) = engine.saves_under_way()
        assert save.result(120) == 5 * C == store.lookup(PROMPTS[0])
        engine.close()
        assert engine.saves_under_way() == []


def test_tiers_under_an_engine_with_few_blocks() -> None:
    expected = generate_each(make_model("llama"), PROMPTS, MAX_TOKENS)
    first = make_engine()
    config = KVStoreConfig(C, ("memory://?size=16KiB", "memory://?size=4MiB"))
    with KVStore(config, metadata_of(first.cache, "m")) as store:
        assert serve(first, store)[0] == expected
        for _ in range(3):
            assert serve(make_engine(num_blocks=14), store)[0] == expected
        stats = store.stats()
        assert stats.promoted_chunks > 0 and stats.hit_tokens > 2 * C


@pytest.mark.parametrize("cache_dtype", ["fp8_e4m3", "int8", "bf16"])
def test_quantised_blocks_keep_every_bit(cache_dtype: str) -> None:
    kv_scales = "calibrate" if cache_dtype.startswith("fp8") else None
    first = make_engine(cache_dtype=cache_dtype, kv_scales=kv_scales)
    with KVStore(KVStoreConfig(C, ("memory://?size=4MiB",)), metadata_of(first.cache, "m")) as store:
        tokens, _ = serve(first, store)
        second = make_engine(cache_dtype=cache_dtype, kv_scales=kv_scales)
        assert serve(second, store) == (tokens, [5 * C, 3 * C - B, C, 0])


def test_corrupted_records_are_computed_again(tmp_path) -> None:
    expected = generate_each(make_model("llama"), PROMPTS, MAX_TOKENS)
    config = KVStoreConfig(C, (f"disk://{tmp_path}?size=16MiB&segment=8MiB",))
    engine = make_engine()
    with KVStore(config, metadata_of(engine.cache, "m")) as store:
        serve(engine, store)
    (file,) = tmp_path.glob("*.segment")
    data, at = bytearray(file.read_bytes()), -1
    while (at := data.find(b"kvpagerc", at + 1)) >= 0:
        data[at + 400] ^= 0x10
    file.write_bytes(bytes(data))
    engine = make_engine()
    with KVStore(config, metadata_of(engine.cache, "m")) as store:
        assert serve(engine, store) == (expected, [0, 0, 0, 0])
        assert store.stats().corrupt_records >= 3


@pytest.mark.parametrize("save_decode_cache", [False, True])
def test_the_stores_configuration_decides_whether_what_is_generated_is_kept(save_decode_cache: bool) -> None:
    engine = make_engine()
    config = KVStoreConfig(C, ("memory://?size=4MiB",), save_decode_cache=save_decode_cache)
    with KVStore(config, metadata_of(engine.cache, "m")) as store:
        tokens, _ = serve(engine, store)
        assert (
            store.lookup(PROMPTS[0] + tokens[0])
            == (len(PROMPTS[0]) + MAX_TOKENS - 1 if save_decode_cache else 5 * C) // B * B
        )


def test_other_weights_are_another_model() -> None:
    first = make_engine()
    with KVStore(KVStoreConfig(C, ("memory://?size=4MiB",)), metadata_of(first.cache, "one")) as store:
        serve(first, store)
        other = KVStore(store.config, metadata_of(first.cache, "two"), [stack_of(store).tiers[0]])
        torch.manual_seed(1)
        assert serve(make_engine(), other)[1] == [0, 0, 0, 0]

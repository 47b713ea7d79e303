"""Stores that are told no dtype, and what a store lists: miss or exact all the same."""

import threading

import pytest
import torch

from kvpage import CacheConfig, CacheEngine, ModelConfig
from kvpage.store import KVStore, KVStoreConfig, KVStoreMetadata, TierError, metadata_of
from kvpage.store.records.kinds import SOUGHT
from kvpage.store.tiers.memory_tier import MemoryTier

C, TOKENS = 4, list(range(10))
PLAIN = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8, torch.uint8]
EIGHT = [torch.float8_e4m3fn, torch.float8_e5m2]


def make(tiers, dtype: torch.dtype | None = None, codec: str = "raw", fmt: str = "vllm") -> KVStore:
    return KVStore(KVStoreConfig(C, codec=codec), KVStoreMetadata("m", fmt=fmt, kv_dtype=dtype), tiers)


def kv_of(dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    raw = torch.randint(0, 100, (2, 2, len(TOKENS), 2, 8), generator=torch.Generator().manual_seed(seed))
    return raw.to(torch.float32).to(dtype)


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return found.dtype == expected.dtype and torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@pytest.fixture
def tier():
    tier = MemoryTier(8 << 20)
    yield tier
    tier.close()


def test_the_sought_ones_are_those_tested() -> None:
    assert set(SOUGHT) == {*PLAIN, *EIGHT}


@pytest.mark.parametrize("dtype", SOUGHT, ids=str)
def test_the_first_tensor_tells(tier: MemoryTier, dtype: torch.dtype) -> None:
    store = make([tier])
    assert store.metadata.kv_dtype is None and store.lookup(TOKENS) == 0 and store.retrieve(TOKENS)[0] == ()
    assert store.pin(TOKENS).num_tokens == 0 and store.remove(TOKENS) == 0 and store.metadata.kv_dtype is None
    with pytest.raises(ValueError, match="kv_dtype must be known before there are keys"):
        store.keys_of(TOKENS)
    assert store.store(TOKENS, kv_of(dtype)).result() == 3
    assert store.metadata == KVStoreMetadata("m", kv_dtype=dtype) and store.given_metadata.kv_dtype is None
    found, mask = store.retrieve(TOKENS, return_tuple=False)
    assert same(found, kv_of(dtype)) and mask.all()
    assert store.keys_of(TOKENS) == make([tier], dtype).keys_of(TOKENS)
    for other in {*SOUGHT} - {dtype}:
        with pytest.raises(ValueError, match=f"kv_tensors must be of {dtype}, got {other}"):
            store.store(TOKENS, kv_of(other))
        assert make([tier], other).lookup(TOKENS) == 0


@pytest.mark.parametrize("dtype", SOUGHT, ids=str)
@pytest.mark.parametrize("ask", ["retrieve", "lookup", "pin"])
def test_the_first_record_that_is_found_tells(tier: MemoryTier, ask: str, dtype: torch.dtype) -> None:
    make([tier], dtype).store(TOKENS, kv_of(dtype))
    store = make([tier])
    assert store.lookup([9, 9, 9]) == 0 and store.metadata.kv_dtype is None
    assert store.lookup(TOKENS, b"elsewhere") == 0 and store.lookup([]) == 0 and store.metadata.kv_dtype is None
    getattr(store, ask)(TOKENS)
    assert store.metadata.kv_dtype == dtype
    assert same(store.retrieve(TOKENS, return_tuple=False)[0], kv_of(dtype))
    other = torch.float16 if dtype != torch.float16 else torch.float32
    with pytest.raises(ValueError, match=f"kv_tensors must be of {dtype}, got {other}"):
        store.store(TOKENS, kv_of(other))


def test_a_corrupt_record_tells_nothing(tier: MemoryTier) -> None:
    good = make([tier], torch.float32)
    good.store(TOKENS, kv_of(torch.float32))
    name = make([tier], torch.bfloat16).keys_of(TOKENS)[0]
    writer = tier.create(name, 1000)
    with writer:
        writer.piece(0, 1000)[:] = bytes(1000)
        tier.commit([writer])
    store = make([tier])
    assert store.lookup(TOKENS) == len(TOKENS) and store.metadata.kv_dtype == torch.float32
    assert store.stats().corrupt_records == 1


def test_a_lost_beginning_is_a_miss_and_can_be_removed(tier: MemoryTier) -> None:
    first = make([tier], torch.float16)
    first.store(TOKENS, kv_of(torch.float16))
    tier.remove(first.keys_of(TOKENS)[:1])
    store = make([tier])
    assert store.lookup(TOKENS) == 0 and store.metadata.kv_dtype is None
    assert store.remove(TOKENS) == 2 and tier.stats().num_records == 0


@pytest.mark.parametrize("codec", ["zstd", "fp8"])
def test_codecs(tier: MemoryTier, codec: str) -> None:
    if codec == "zstd":
        pytest.importorskip("zstandard")
    make([tier], torch.float16, codec).store(TOKENS, kv_of(torch.float16))
    store = make([tier], None, codec)
    found, mask = store.retrieve(TOKENS, return_tuple=False)
    assert mask.all() and found.dtype == store.metadata.kv_dtype == torch.float16
    if codec == "fp8":
        with pytest.raises(ValueError, match="dtype must be bfloat16, float16 or float32 for fp8"):
            make([MemoryTier(1 << 20)], None, codec).store(TOKENS, kv_of(torch.int8))
    with pytest.raises(ValueError, match="codec must be raw, zstd, split or fp8"):
        make([tier], None, "lzma")


def test_a_failed_call_settles_nothing(tier: MemoryTier) -> None:
    store = make([tier])
    mixed = [(kv_of(torch.float32)[0, 0], kv_of(torch.float16)[0, 1])]
    for tokens, kv in ((TOKENS, mixed), (TOKENS[:3], kv_of(torch.float32)), (TOKENS, torch.zeros(3))):
        with pytest.raises(ValueError):
            store.store(tokens, kv)
    with pytest.raises(ValueError, match="kv_tensors must be of one dtype, got torch.float16, torch.float32"):
        store.store(TOKENS, mixed)
    assert store.metadata.kv_dtype is None and tier.stats().num_records == 0


def test_an_engine_tells() -> None:
    model = ModelConfig(8, 1, ("full_attention",), torch.float16)
    engine = CacheEngine(CacheConfig(block_size=2, num_gpu_blocks=8), model)
    for cache in engine.gpu_cache:
        cache.normal_()
    tier = MemoryTier(8 << 20)
    told = metadata_of(engine, "m")
    unknown = KVStoreMetadata("m", kv_dtype=None, row_layout=told.row_layout, scales_digest=told.scales_digest)
    store = KVStore(KVStoreConfig(C), unknown, [tier])
    for call in (lambda: store.store_blocks(TOKENS, engine, [0]), lambda: store.load_blocks(TOKENS, engine, [0], 99)):
        with pytest.raises(ValueError):
            call()
    with pytest.raises(TypeError, match="engine must be a CacheEngine"):
        store.store_blocks(TOKENS, object(), [0])
    assert store.metadata.kv_dtype is None
    assert store.store_blocks(TOKENS, engine, range(5)) == len(TOKENS) and store.metadata == told
    other = KVStore(KVStoreConfig(C), unknown, [tier])
    assert other.load_blocks(TOKENS, engine, [5, 6]) == 4 and other.metadata == told
    assert torch.equal(engine.gpu_cache[0][:, 5:7], engine.gpu_cache[0][:, 0:2])


def test_threads_that_store_at_once_agree(tier: MemoryTier) -> None:
    for attempt in range(20):
        store, results, barrier = make([MemoryTier(1 << 20)]), [], threading.Barrier(2)

        def run(dtype: torch.dtype, store=store, results=results, barrier=barrier, attempt=attempt) -> None:
            barrier.wait()
            try:
                store.store(TOKENS, kv_of(dtype, attempt))
                results.append(dtype)
            except ValueError as error:
                assert "must be of" in str(error)

        threads = [threading.Thread(target=run, args=(dtype,)) for dtype in (torch.float16, torch.bfloat16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [store.metadata.kv_dtype]
        assert same(store.retrieve(TOKENS, return_tuple=False)[0], kv_of(results[0], attempt))


# --- what a store lists ----------------------------------------------------------------------------------------------


class Mute(MemoryTier):
    def infos(self):
        raise TierError("cannot tell")


def test_listing() -> None:
    fast, slow = MemoryTier(8 << 20, name="fast"), MemoryTier(8 << 20, name="slow")
    store = make([fast, Mute(1 << 20), slow], torch.float32)
    assert store.keys() == [] and store.records() == []
    store.store(TOKENS, kv_of(torch.float32), namespace=b"tenant")
    store.store([7], kv_of(torch.float32)[:, :, :1])
    tenant, plain = store.keys_of(TOKENS, b"tenant"), store.keys_of([7])
    fast.remove(tenant[1:2])
    assert sorted(store.keys()) == sorted(tenant + plain) and store.keys()[-1] == tenant[1]
    found = {(one.tier, one.key): (one.model, one.namespace, one.num_tokens, one.codec) for one in store.records()}
    expected = {
        (tier, key.hex()): ("m", name, count, "float32")
        for tier in ("fast", "slow")
        for key, name, count in [*((key, b"tenant", n) for key, n in zip(tenant, (4, 4, 2), strict=True)),
                                 (plain[0], b"", 1)]
        if (tier, key) != ("fast", tenant[1])
    }  # fmt: skip
    assert found == expected
    assert store.stats().tier_errors == 5  # of the mute one, each time
    store.close()
    with pytest.raises(ValueError, match="closed"):
        store.keys()

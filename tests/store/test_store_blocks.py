"""Blocks of an engine to records and back: every layout and dtype, any start, and nothing else is touched."""

import gc
import weakref

import pytest
import torch
from support.insides import entries_of, stack_of
from support.store_engines import TOKENS, B, C, L, all_bytes, make_engine, tokens_of
from support.store_kv import corrupt

from kvpage import CacheEngine, KVScales, ops
from kvpage.layout import cache_layout
from kvpage.store import KVStore, KVStoreConfig, KVStoreMetadata, metadata_of
from kvpage.store.load.block_chunks import BlockChunks
from kvpage.store.tiers.memory_tier import MemoryTier

BACKENDS = [(name, kv) for name in ("flash", "flashinfer") for kv in ("NHD", "HND")] + [
    ("paged", "NHD"),
    ("mla", "NHD"),
]
LAYOUTS = [
    {"backend": backend, "kv_layout": kv_layout, "layer_layout": layer_layout}
    for backend, kv_layout in BACKENDS
    for layer_layout in ("separate", "packed")
]


def make_store(engine: CacheEngine, fmt: str = "vllm", **fields) -> KVStore:
    tier = MemoryTier(1 << 20, pin_memory=False)
    return KVStore(KVStoreConfig(C, num_threads=2, **fields), metadata_of(engine, "m", fmt=fmt), [tier])


@pytest.mark.parametrize("fmt", ["vllm", "huggingface"])
@pytest.mark.parametrize("cache_dtype", ["auto", "fp32", "fp8_e4m3", "int8"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(layout.values()))
def test_blocks_come_back_bit_by_bit_and_nothing_else_changes(layout: dict, cache_dtype: str, fmt: str) -> None:
    fields = {**layout, "cache_dtype": cache_dtype}
    source, target = make_engine(seed=1, **fields), make_engine(seed=2, **fields)
    store = make_store(source, fmt)
    table, other = [5, 0, 23, 7, 9, 2, 11, 3], [1, 22, 4, 17, 6, 8, 19, 10]
    assert store.store_blocks(TOKENS, source, table) == len(TOKENS)
    before = all_bytes(target)
    for start, num_blocks in ((0, 8), (8, 8), (C, 8), (16, 6), (0, 1), (28, 8)):
        for layer, saved in zip(target.gpu_cache, before, strict=True):
            layer.copy_(saved.view(layer.dtype).view(layer.shape))
        end = min(len(TOKENS), num_blocks * B)
        assert store.load_blocks(TOKENS, target, torch.tensor(other[:num_blocks]), start) == end
        found, expected = tokens_of(target, other, 0, 32), tokens_of(make_engine(seed=2, **fields), other, 0, 32)
        dim = 2
        expected.narrow(dim, start, end - start).copy_(tokens_of(source, table, start, end))
        assert torch.equal(found, expected)
        unused = sorted(set(range(24)) - set(other))
        after = tokens_of(target, unused, 0, len(unused) * B)
        assert torch.equal(after, tokens_of(make_engine(seed=2, **fields), unused, 0, len(unused) * B))
    assert store.stats().corrupt_records == 0


def test_as_tensors_and_as_blocks_are_the_same_records() -> None:
    engine = make_engine()
    store = make_store(engine)
    table = list(range(8))
    store.store_blocks(TOKENS, engine, table)
    kv, mask = store.retrieve(TOKENS, return_tuple=False)
    assert mask.all()
    chunk = torch.empty_like(kv)
    ops.store_chunk(engine.gpu_cache, torch.arange(8, dtype=torch.int32), chunk, engine.layout)
    assert torch.equal(kv.view(torch.uint8), chunk.view(torch.uint8))
    store.clear()
    store.store(TOKENS, kv)
    for layer in engine.gpu_cache:
        layer.zero_()
    assert store.load_blocks(TOKENS, engine, table) == len(TOKENS)
    again = torch.empty_like(kv)
    ops.store_chunk(engine.gpu_cache, torch.arange(8, dtype=torch.int32), again, engine.layout)
    assert torch.equal(again.view(torch.uint8), chunk.view(torch.uint8))


def test_prefixes_and_corrupted_chunks_end_a_load() -> None:
    engine = make_engine()
    store = make_store(engine)
    store.store_blocks(TOKENS[:20], engine, list(range(5)))
    assert store.load_blocks(TOKENS, engine, list(range(8, 16))) == C  # the second chunk is shorter than asked for
    assert store.load_blocks(TOKENS[:20], engine, list(range(8, 16))) == 20
    assert store.load_blocks(TOKENS[:20], engine, list(range(8, 16)), start=20) == 20
    assert store.load_blocks([7, 7], engine, [8]) == 0
    tier = stack_of(store).tiers[0].tier
    key = store.keys_of(TOKENS[:20])[1]
    corrupt(tier, key, entries_of(tier)[key].num_bytes - 20)
    assert store.load_blocks(TOKENS[:20], engine, list(range(8, 16))) == C
    assert store.load_blocks(TOKENS[:20], engine, list(range(8, 16)), start=16) == 16
    assert store.stats().corrupt_records == 1 and store.lookup(TOKENS[:20]) == C


def test_stores_of_other_caches_are_refused() -> None:
    engine = make_engine()
    store = make_store(engine)
    for other, name in (
        (make_engine(cache_dtype="fp32"), "kv_dtype"),
        (make_engine(cache_dtype="int8"), "kv_dtype"),
    ):
        with pytest.raises(ValueError, match=f"{name} of the store must be the engine's"):
            store.store_blocks(TOKENS, other, list(range(8)))
    scales = [KVScales.of(1.0, 2.0)] * L
    scaled = make_engine(cache_dtype="fp8_e4m3", scales=scales)
    plain = KVStore(KVStoreConfig(C, ("memory://?size=1MiB",)), KVStoreMetadata("m", kv_dtype=torch.float8_e4m3fn))
    with pytest.raises(ValueError, match="scales_digest of the store must be the engine's"):
        plain.load_blocks(TOKENS, scaled, list(range(8)))
    own = KVStore(KVStoreConfig(C, ("memory://?size=1MiB",)), metadata_of(scaled, "m"))
    assert own.store_blocks(TOKENS, scaled, list(range(8))) == len(TOKENS)


def test_a_plan_refuses_what_does_not_fit_and_writes_nothing() -> None:
    engine = make_engine()
    before = all_bytes(engine)
    plan = BlockChunks(engine, [1, 2, 3], metadata_of(engine, "m")).rows.form("vllm", C).plans[0]
    payload, ids = torch.full((L * 2 * C * 2 * 10 * 2,), 7, dtype=torch.uint8), torch.tensor([1, 2, 3, 24]).int()
    size, at = len(payload) // L, payload.data_ptr()

    def place(start: int, num_ids: int = 4) -> tuple[int, int, int, int, bool]:
        return ids.data_ptr(), num_ids, start, 1, True

    for match, first, num_bytes, start in [
        (f"num_bytes must be whole layers of {size}, got 1", 0, 1, 0),
        ("layers must be in .0, 3., got 1 to 4", 1, 3 * size, 0),
        ("layers must be in .0, 3., got -1 to 0", -1, size, 0),
        ("start must not be negative, got -1", 0, size, -1),
        ("block_ids must hold the blocks of 12 tokens from 5, got room for 16", 0, size, 5),
        (r"block_ids\[3\] must be in \[0, 24\), got 24", 0, size, B),
    ]:
        with pytest.raises(ValueError, match=match):
            plan.store(place(start), first, at, num_bytes)
        with pytest.raises(ValueError, match=match):
            plan.load(place(start), first, at, num_bytes, 0, C)
    for first_token, last_token in [(-1, 3), (5, 4), (0, C + 1)]:
        with pytest.raises(ValueError, match=f"tokens must be in .0, {C}., got {first_token} to {last_token}"):
            plan.load(place(0), 0, at, size, first_token, last_token)
    assert all(map(torch.equal, all_bytes(engine), before)) and bool((payload == 7).all())


@pytest.mark.parametrize("ids", [[0, 1, 2, 2**32 + 3], [0, 1, 2, -1], [0, 1, 2, 24], [0.5, 1.0, 2.0, 3.0]])
@pytest.mark.parametrize("make", [list, torch.tensor])
def test_ids_of_no_block_are_refused_before_anything_is_stored_or_loaded(ids, make):
    """An id of 64 bits was cut to 32, so that another block was stored; a bad one in chunk 2 left chunk 1."""
    engine = make_engine()
    store, tokens = make_store(engine), TOKENS[:16]
    before = [cache.clone().view(torch.uint8) for cache in engine.gpu_cache]
    for call in (store.store_blocks, store.load_blocks):
        with pytest.raises(ValueError, match="block_table must"):
            call(tokens, engine, make(ids))
        assert store.lookup(tokens) == 0
    assert all(torch.equal(old, now.view(torch.uint8)) for old, now in zip(before, engine.gpu_cache, strict=True))


@pytest.mark.parametrize("fields", [{}, {"backend": "mla"}, {"cache_dtype": "int8"}], ids=str)
def test_a_layout_is_derived_once_for_all_calls(fields: dict, monkeypatch) -> None:
    """Asking a backend for its shape takes longer than finding a small chunk."""
    derived = []
    engine, other = make_engine(**fields), make_engine(**fields)
    (store, other_store), table = (make_store(engine), make_store(other)), list(range(8))
    get_backend = cache_layout.get_backend
    monkeypatch.setattr(cache_layout, "get_backend", lambda name: derived.append(name) or get_backend(name))
    store.store_blocks(TOKENS[:C], engine, table)
    num_first = len(derived)
    other_store.store_blocks(TOKENS[: 2 * C], other, table)  # both chunks have one form, in whichever thread
    assert len(derived) == 2 * num_first
    derived.clear()
    store.store_blocks(TOKENS[:C], engine, table)
    store.load_blocks(TOKENS[:C], engine, table)
    assert derived == []
    store.store_blocks(TOKENS, engine, table)  # a chunk of another length has a plan of its own
    num_derived = len(derived)
    store.load_blocks(TOKENS, engine, table)
    store.store_blocks(TOKENS, engine, table, skip_existing=False)
    assert len(derived) == num_derived


def test_an_engine_is_not_kept_by_what_a_store_knows_of_it() -> None:
    engine = make_engine()
    store, weak = make_store(engine), weakref.ref(engine)
    memory = weakref.ref(engine.gpu_cache[0])
    store.store_blocks(TOKENS, engine, list(range(8)))
    del engine
    gc.collect()
    assert weak() is None and memory() is None
    store.close()

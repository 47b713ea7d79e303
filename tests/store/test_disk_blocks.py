"""Blocks on the disk: records of many runs, and blocks that change while they are stored."""

import os
import threading
import types
from pathlib import Path

import pytest
import torch
from store_records import read

from kvpage import CacheConfig, CacheEngine, ModelConfig
from kvpage.store import KVStore, KVStoreConfig, disk_segment, metadata_of
from kvpage.store.disk import SLOT_BYTES, DiskTier
from kvpage.store.memory import MemoryTier

B, C, L = 16, 32, 3
TOKENS = list(range(75))  # chunks of 32, 32 and 11
TABLE = [7, 0, 9, 3, 4]
LAYOUTS = [("flash", "NHD"), ("flash", "HND"), ("flashinfer", "NHD"), ("paged", "NHD"), ("mla", "NHD")]


def make_engine(backend: str = "flash", kv_layout: str = "NHD", **fields) -> CacheEngine:
    """Blocks of 32 KiB a part and layer: longer than what is fetched ahead."""
    is_mla = backend == "mla"
    model = ModelConfig(256, 1 if is_mla else 2, ("full_attention",) * L, torch.float32, is_mla)
    engine = CacheEngine(CacheConfig(B, 10, backend=backend, kv_layout=kv_layout, **fields), model)
    generator = torch.Generator().manual_seed(1)
    for layer in engine.gpu_cache:
        layer.view(torch.int32).random_(generator=generator)
    return engine


def make_store(engine: CacheEngine, tier, fmt: str = "vllm") -> KVStore:
    return KVStore(KVStoreConfig(C, num_threads=1), metadata_of(engine, "m", fmt=fmt), [tier])


def disk(path: Path) -> DiskTier:
    return DiskTier([path], 32 << 20, segment_bytes=16 << 20, retry_seconds=0)


@pytest.mark.parametrize("fmt", ["vllm", "huggingface"])
@pytest.mark.parametrize("layer_layout", ["separate", "packed"])
@pytest.mark.parametrize("backend, kv_layout", LAYOUTS)
def test_the_same_records_as_in_memory(
    tmp_path: Path, backend: str, kv_layout: str, layer_layout: str, fmt: str
) -> None:
    """One copies past the cache, the other does not."""
    engine = make_engine(backend, kv_layout, layer_layout=layer_layout)
    before = [layer.clone() for layer in engine.gpu_cache]
    tiers = disk(tmp_path), MemoryTier(16 << 20, pin_memory=False)
    stores = [make_store(engine, tier, fmt) for tier in tiers]
    for store in stores:
        assert store.store_blocks(TOKENS, engine, TABLE) == len(TOKENS)
    names = stores[0]._keys.of(TOKENS)
    found = [[read(reader) for reader in tier.open(names)] for tier in tiers]
    assert found[0] == found[1]
    dim = next(dim for dim, size in enumerate(before[0].shape) if size == 10)
    for store in stores:
        for layer in engine.gpu_cache:
            layer[:] = 0
        assert store.load_blocks(TOKENS, engine, TABLE) == len(TOKENS)
        full = torch.tensor(TABLE[:-1])  # the last one's end was never stored
        for layer, saved in zip(engine.gpu_cache, before, strict=True):
            pair = (part.index_select(dim, full).view(torch.int32) for part in (layer, saved))
            assert torch.equal(*pair)
        assert store.stats().corrupt_records == 0


def test_blocks_that_change_before_the_disk_has_them(tmp_path: Path, monkeypatch) -> None:
    """Whoever owns the blocks should not let it happen. What comes back are the bytes that were copied and hashed."""
    engine, tier = make_engine(), disk(tmp_path)
    store, before = make_store(engine, tier), [layer.clone() for layer in engine.gpu_cache]

    def pwrite(fd, data, offset):
        if len(data) > SLOT_BYTES:  # more than a header
            changed.append(len(data))
            for layer in engine.gpu_cache:
                layer[:] = 42.0
        return os.pwrite(fd, data, offset)

    changed: list[int] = []
    monkeypatch.setattr(disk_segment, "os", types.SimpleNamespace(**{**vars(os), "pwrite": pwrite}))
    assert store.store_blocks(TOKENS[:C], engine, [0, 1]) == C and changed
    assert (engine.gpu_cache[0] == 42.0).all()
    assert store.load_blocks(TOKENS[:C], engine, [0, 1]) == C and store.stats().corrupt_records == 0
    for layer, saved in zip(engine.gpu_cache, before, strict=True):
        assert torch.equal(layer[:, :2].view(torch.int32), saved[:, :2].view(torch.int32))
        assert (layer[:, 2:] == 42.0).all()


def test_blocks_that_change_all_the_time(tmp_path: Path) -> None:
    """A record is a miss, or right to its last digest: no exception, and nothing else is hurt."""
    engine, tier = make_engine(), disk(tmp_path)
    store, is_over = make_store(engine, tier), threading.Event()

    def change() -> None:
        while not is_over.is_set():
            for layer in engine.gpu_cache:
                layer[:, 0] += 1.0

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(30):
            store.store_blocks(TOKENS[:C], engine, [0, 1], skip_existing=False)
            assert store.load_blocks(TOKENS[:C], engine, [2, 3]) in (0, C)
            rows = engine.gpu_cache[1].view(torch.int32)  # block 1 stays as it is
            assert store.lookup(TOKENS[:C]) == 0 or torch.equal(rows[:, 3], rows[:, 1])
    finally:
        is_over.set()
        thread.join()
    store.store_blocks(TOKENS[:C], engine, [0, 1], skip_existing=False)
    assert store.load_blocks(TOKENS[:C], engine, [2, 3]) == C
    assert torch.equal(engine.gpu_cache[0][:, 2:4].view(torch.int32), engine.gpu_cache[0][:, :2].view(torch.int32))
    tier.check()

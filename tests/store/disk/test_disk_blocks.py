"""Blocks on the disk: records of many runs, and blocks that change while they are stored."""

import itertools
import tempfile
from pathlib import Path

import pytest
import torch
from support.store_records import read

from kvpage import CacheConfig, CacheEngine, ModelConfig
from kvpage.store import KVStore, KVStoreConfig, metadata_of
from kvpage.store.disk import segment as disk_segment
from kvpage.store.disk.disk_tier import DiskTier
from kvpage.store.disk.reader_writer import DiskReader
from kvpage.store.tiers.memory_tier import MemoryTier
from kvpage.store.tiers.stretches import write_stretches

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


def load_blocks(store: KVStore, engine: CacheEngine) -> int:
    return store.load_blocks(TOKENS, engine, TABLE)


def load_layers(store: KVStore, engine: CacheEngine) -> int:
    with store.load_layers(TOKENS, engine, TABLE) as load:
        return load.result()


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
    names = stores[0].keys_of(TOKENS)
    found = [[read(reader) for reader in tier.open(names)] for tier in tiers]
    assert found[0] == found[1]
    dim = next(dim for dim, size in enumerate(before[0].shape) if size == 10)
    for store, load in itertools.product(stores, (load_blocks, load_layers)):
        for layer in engine.gpu_cache:
            layer[:] = 0
        assert load(store, engine) == len(TOKENS)
        full = torch.tensor(TABLE[:-1])  # the last one's end was never stored
        for layer, saved in zip(engine.gpu_cache, before, strict=True):
            pair = (part.index_select(dim, full).view(torch.int32) for part in (layer, saved))
            assert torch.equal(*pair)
        assert store.stats().corrupt_records == 0


@pytest.mark.parametrize("fmt", ["vllm", "huggingface"])
@pytest.mark.parametrize("layer_layout", ["separate", "packed"])
@pytest.mark.parametrize("backend, kv_layout", LAYOUTS)
def test_which_blocks_are_written_from_where_they_lie(
    tmp_path: Path, monkeypatch, backend: str, kv_layout: str, layer_layout: str, fmt: str
) -> None:
    """Those whose tokens lie among each other as they do in a chunk; they are not copied before."""
    engine = make_engine(backend, kv_layout, layer_layout=layer_layout)
    calls: list[int] = []

    def count_runs(*arguments) -> bytes:
        calls.append(len(arguments[3]))
        return write_stretches(*arguments)

    monkeypatch.setattr(disk_segment, "write_stretches", count_runs)
    make_store(engine, disk(tmp_path), fmt).store_blocks(TOKENS, engine, TABLE)
    num_parts = 1 if backend == "mla" else 2
    is_dense = backend == "mla" or (backend != "paged" and (kv_layout, fmt) == ("NHD", "vllm"))
    assert sorted(calls) == ([L * num_parts, 2 * L * num_parts, 2 * L * num_parts] if is_dense else [])


def change_between(engine: CacheEngine, monkeypatch, is_hashed_first: bool) -> list[int]:
    """The blocks change when a record is written, before they are hashed or after it. How many writes there were."""
    changed: list[int] = []

    def write(fd, offset, lead, runs, stretch_bytes, tail, num_threads) -> bytes:
        before = write_stretches(fd, offset, lead, runs, stretch_bytes, tail, num_threads)
        rest = bytes(tail)
        for layer in engine.gpu_cache:
            layer[:] = 42.0
        changed.append(len(runs))
        with tempfile.TemporaryFile() as file:
            after = write_stretches(file.fileno(), 0, memoryview(b""), runs, stretch_bytes, tail, num_threads)
        tail[:] = rest
        return before if is_hashed_first else after

    monkeypatch.setattr(disk_segment, "write_stretches", write)
    return changed


def test_blocks_that_change_after_they_were_hashed(tmp_path: Path, monkeypatch) -> None:
    """Whoever owns the blocks should not let it happen. What comes back are the bytes that were written and hashed."""
    engine, tier = make_engine(), disk(tmp_path)
    store, before = make_store(engine, tier), [layer.clone() for layer in engine.gpu_cache]
    changed = change_between(engine, monkeypatch, is_hashed_first=True)
    assert store.store_blocks(TOKENS[:C], engine, [0, 1]) == C and changed
    assert (engine.gpu_cache[0] == 42.0).all()
    assert store.load_blocks(TOKENS[:C], engine, [0, 1]) == C and store.stats().corrupt_records == 0
    for layer, saved in zip(engine.gpu_cache, before, strict=True):
        assert torch.equal(layer[:, :2].view(torch.int32), saved[:, :2].view(torch.int32))
        assert (layer[:, 2:] == 42.0).all()


def test_blocks_that_change_between_writing_and_hashing(tmp_path: Path, monkeypatch) -> None:
    """A miss, whoever reads, and the record is dropped: it is neither what they were nor what they are."""
    engine, tier = make_engine(), disk(tmp_path)
    store = make_store(engine, tier)
    with monkeypatch.context() as patch:
        changed = change_between(engine, patch, is_hashed_first=False)
        assert store.store_blocks(TOKENS[:C], engine, [0, 1]) == C and changed
    assert store.load_blocks(TOKENS[:C], engine, [2, 3]) == 0 and store.stats().corrupt_records == 1
    assert store.lookup(TOKENS[:C]) == 0
    assert store.store_blocks(TOKENS[:C], engine, [0, 1]) == C
    assert store.load_blocks(TOKENS[:C], engine, [2, 3]) == C
    assert (engine.gpu_cache[0] == 42.0).all()
    tier.check()


@pytest.mark.parametrize("start, is_straight", [(0, True), (1, False)])
def test_layers_are_read_straight_into_blocks(tmp_path: Path, monkeypatch, start: int, is_straight: bool) -> None:
    """A chunk whose first tokens are not wanted comes by way of a piece."""
    engine, straight, read_runs = make_engine(), [], DiskReader.read_runs

    def counted(reader: DiskReader, begin: int, runs, *others) -> bytes:
        straight.append(begin)
        return read_runs(reader, begin, runs, *others)

    monkeypatch.setattr(DiskReader, "read_runs", counted)
    with make_store(engine, disk(tmp_path)) as store:
        store.store_blocks(TOKENS[:C], engine, TABLE)
        with store.load_layers(TOKENS[:C], engine, TABLE, start) as load:
            assert load.result() == C
    assert len(straight) == (L if is_straight else 0)


@pytest.mark.parametrize("chunk", range(3))
@pytest.mark.parametrize("layer", range(L))
def test_a_damaged_layer_ends_the_tokens_from_there_on(tmp_path: Path, chunk: int, layer: int) -> None:
    """Of a layer that is read straight into blocks."""
    engine, tier = make_engine(), disk(tmp_path)
    with make_store(engine, tier) as store:
        store.store_blocks(TOKENS, engine, TABLE)
        (reader,) = tier.open([store.keys_of(TOKENS)[chunk]])
        assert isinstance(reader, DiskReader)
        layer_bytes = 2 * min(C, len(TOKENS) - chunk * C) * 2 * 256 * 4
        begin = reader.num_bytes - 16 - 16 * L - (L - layer) * layer_bytes
        wrong = bytes([reader.piece(begin, begin + 1)[0] ^ 1])
        run = reader._entry.run
        reader._entry.space.segment.write(run, disk_segment.HEADER_BYTES + begin, memoryview(wrong))
        reader.close()
        with store.load_layers(TOKENS, engine, TABLE) as load:
            found = [load.wait(one) for one in range(L)]
        assert found == [len(TOKENS)] * layer + [chunk * C] * (L - layer)
        assert store.lookup(TOKENS) == chunk * C and store.stats().corrupt_records == 1

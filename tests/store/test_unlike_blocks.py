"""Records of layers with heads and sizes of their own: bit by bit, whole and layer by layer, and never another's."""

from pathlib import Path

import pytest
import torch
from support.store_engines import TOKENS, C
from support.unlike_layers import PLACES, SHAPES, B, blocks_of, make_engine, model_config, rows_of

from kvpage import CacheConfig, CacheEngine
from kvpage.store import KVStore, KVStoreConfig, metadata_of
from kvpage.store.records import record_io
from kvpage.store.tiers.memory_tier import MemoryTier

TABLE, OTHER = [5, 0, 10, 7, 9, 2, 11, 3], [1, 6, 4, 8, 0, 2, 11, 10]
IDS = dict(ids=lambda place: "-".join(place.values()))


def make_store(engine: CacheEngine, tier: MemoryTier | None = None, fmt: str = "vllm", **fields) -> KVStore:
    tier = tier or MemoryTier(1 << 20, pin_memory=False)
    return KVStore(KVStoreConfig(C, num_threads=2, **fields), metadata_of(engine, "m", fmt=fmt), [tier])


def check_loaded(source: CacheEngine, target: CacheEngine, kept: CacheEngine, start: int, end: int) -> None:
    """The tokens [start, end) are the source's; all others, and other blocks, are as they were."""
    wanted, found = rows_of(source, TABLE, start, end), rows_of(target, OTHER, start, end)
    assert all(map(torch.equal, found, wanted))
    for first, last in ((0, start), (end, 8 * B)):
        assert all(map(torch.equal, rows_of(target, OTHER, first, last), rows_of(kept, OTHER, first, last)))
    unused = sorted(set(range(12)) - set(OTHER))
    for now, then in zip(blocks_of(target, target.gpu_cache), blocks_of(kept, kept.gpu_cache), strict=True):
        assert torch.equal(now[unused], then[unused])


@pytest.mark.parametrize("fmt", ["vllm", "huggingface"])
@pytest.mark.parametrize("cache_dtype", ["auto", "fp8_e4m3", "int8"])
@pytest.mark.parametrize("place", PLACES, **IDS)
@pytest.mark.parametrize("kind", SHAPES)
def test_blocks_come_back_bit_by_bit(kind: str, place: dict, cache_dtype: str, fmt: str) -> None:
    fields = {**place, "cache_dtype": cache_dtype}
    source, kept = make_engine(kind, seed=1, **fields), make_engine(kind, seed=2, **fields)
    store = make_store(source, fmt=fmt)
    assert store.store_blocks(TOKENS, source, TABLE) == len(TOKENS)
    for start in (0, 1, C, 30):
        target = make_engine(kind, seed=2, **fields)
        assert store.load_blocks(TOKENS, target, OTHER, start=start) == len(TOKENS)
        check_loaded(source, target, kept, start, len(TOKENS))
        target = make_engine(kind, seed=2, **fields)
        with store.load_layers(TOKENS, target, OTHER, start) as load:
            assert [load.wait(layer) for layer in range(load.num_layers)] == [len(TOKENS)] * len(target.gpu_cache)
        check_loaded(source, target, kept, start, len(TOKENS))
    assert store.stats().corrupt_records == 0


@pytest.mark.parametrize("piece_bytes", [1, 500, 1 << 20])
@pytest.mark.parametrize("codec", ["raw", "zstd"])
@pytest.mark.parametrize("kind", SHAPES)
def test_records_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, codec: str, piece_bytes: int
) -> None:
    """Pieces end with layers, however small they are; memory goes to a file and back directly, or by pieces."""
    monkeypatch.setattr(record_io, "PIECE_BYTES", piece_bytes)
    source, kept, target = make_engine(kind, seed=1), make_engine(kind, seed=2), make_engine(kind, seed=2)
    config = KVStoreConfig(C, (f"disk://{tmp_path}?size=4MiB",), codec=codec, num_threads=1)
    with KVStore(config, metadata_of(source, "m")) as store:
        store.store_blocks(TOKENS, source, TABLE)
    with KVStore(config, metadata_of(source, "m")) as store:
        assert store.load_blocks(TOKENS, target, OTHER, start=5) == len(TOKENS)
    check_loaded(source, target, kept, 5, len(TOKENS))


def test_keys_name_the_shapes() -> None:
    """Engines of other shapes find nothing, though a token takes as many bytes."""
    tier, source = MemoryTier(1 << 20, pin_memory=False), make_engine("gemma4")
    make_store(source, tier).store_blocks(TOKENS, source, TABLE)
    words = {kind: metadata_of(make_engine(kind), "m").row_layout for kind in SHAPES}
    assert words["gemma4"] == "layers 4x8*2,1x16*1,4x8*1,1x16*1" and words["narrow V"] == "layers 2x12+8*3"
    assert len(set(words.values())) == len(SHAPES)
    for kind in SHAPES:
        found = make_store(make_engine(kind), tier).lookup(TOKENS)
        assert found == (len(TOKENS) if kind == "gemma4" else 0)


def test_refusals() -> None:
    engine = make_engine("gemma4")
    uniform = CacheEngine(CacheConfig(B, 4), model_config("narrow V").with_caches_of([0]))
    with pytest.raises(ValueError, match="codec must be 'raw' or 'zstd' for layers of unlike heads or sizes"):
        make_store(engine, codec="fp8").store_blocks(TOKENS, engine, TABLE)
    with pytest.raises(ValueError, match="row_layout of the store must be the engine's, 'layers 2x12.8.1'"):
        make_store(engine).store_blocks(TOKENS, uniform, [0])

"""LayerwiseStore: a chunk is there when the records of all its layers are. No other byte is written."""

import threading

import numpy as np
import pytest
import torch
from support.store_engines import TOKENS, B, C, L, all_bytes, make_engine, tokens_of

from kvpage import CacheConfig, CacheEngine, ModelConfig
from kvpage.cache.layer_slice import LayerSlice
from kvpage.store import ArrivingStore, KVStore, KVStoreConfig, KVStoreMetadata, LayerwiseStore, metadata_of

BLOCKS = list(range(8))


@pytest.fixture
def store():
    with KVStore(KVStoreConfig(C, ("memory://?size=4MiB",)), metadata_of(make_engine(), "m")) as made:
        yield made


def filled(store: KVStore, engine: CacheEngine, num_tokens: int, num_layers: int) -> LayerwiseStore:
    layerwise = LayerwiseStore(store, engine, num_layers)
    assert layerwise.store_blocks(TOKENS[:num_tokens], engine, BLOCKS) == num_tokens
    return layerwise


@pytest.mark.parametrize("num_layers", [1, 2, L, L + 1])
@pytest.mark.parametrize("num_tokens", [0, 1, B - 1, B, B + 1, C, C + 1, len(TOKENS)])
def test_what_is_stored_is_loaded_and_nothing_else_written(store, num_layers: int, num_tokens: int) -> None:
    source, target, tokens = make_engine(seed=1), make_engine(seed=2), TOKENS[:num_tokens]
    filled(store, source, num_tokens, num_layers)
    layerwise, before = LayerwiseStore(store, target, num_layers), all_bytes(target)
    if num_tokens < len(TOKENS):
        assert layerwise.lookup(TOKENS) == num_tokens // C * C  # a shorter last chunk is of these tokens alone
    assert layerwise.lookup(tokens) == num_tokens
    assert layerwise.lookup(tokens, namespace=b"other") == 0
    assert layerwise.load_blocks(tokens, target, BLOCKS) == num_tokens
    if num_tokens:
        assert torch.equal(tokens_of(target, BLOCKS, 0, num_tokens), tokens_of(source, BLOCKS, 0, num_tokens))
    expected = make_engine(seed=2)
    with KVStore(KVStoreConfig(C, ("memory://?size=4MiB",)), metadata_of(source, "m")) as other:
        other.store_blocks(tokens, source, BLOCKS)
        other.load_blocks(tokens, expected, BLOCKS)
    assert all(torch.equal(a, b) for a, b in zip(all_bytes(target), all_bytes(expected), strict=True))
    assert num_tokens or all(torch.equal(a, b) for a, b in zip(all_bytes(target), before, strict=True))


@pytest.mark.parametrize("codec", ["zstd", "fp8"])
def test_codecs_give_what_they_give_for_all_layers(codec: str) -> None:
    """Layers are scaled by themselves."""
    if codec == "zstd":
        pytest.importorskip("zstandard")
    source, target, expected = (make_engine(seed=seed) for seed in (1, 2, 2))
    config, metadata = KVStoreConfig(C, ("memory://?size=4MiB",), codec=codec), metadata_of(source, "m")
    with KVStore(config, metadata) as store, KVStore(config, metadata) as other:
        filled(store, source, len(TOKENS), 2)
        assert LayerwiseStore(store, target, 2).load_blocks(TOKENS, target, BLOCKS) == len(TOKENS)
        other.store_blocks(TOKENS, source, BLOCKS)
        assert other.load_blocks(TOKENS, expected, BLOCKS) == len(TOKENS)
    assert all(torch.equal(a, b) for a, b in zip(all_bytes(target), all_bytes(expected), strict=True))
    is_exact = torch.equal(tokens_of(target, BLOCKS, 0, len(TOKENS)), tokens_of(source, BLOCKS, 0, len(TOKENS)))
    assert is_exact == (codec == "zstd")


@pytest.mark.parametrize("start", [0, 1, B, C, C + B])
def test_a_chunk_whose_layers_are_not_all_there_is_a_miss(store, start: int) -> None:
    source, target = make_engine(seed=1), make_engine(seed=2)
    first = filled(store, source, 2 * C, 1)
    first.groups[1].put(TOKENS, BLOCKS, 2)
    first.groups[0].put(TOKENS, BLOCKS, 2)
    layerwise = LayerwiseStore(store, target, 1)
    assert layerwise.lookup(TOKENS) == 2 * C
    assert layerwise.load_blocks(TOKENS, target, BLOCKS, start=start) == 2 * C
    assert torch.equal(tokens_of(target, BLOCKS, start, 2 * C), tokens_of(source, BLOCKS, start, 2 * C))
    first.groups[0].remove(TOKENS[:C])
    assert layerwise.lookup(TOKENS) == 0
    assert layerwise.load_blocks(TOKENS, target, BLOCKS, start=start) == (start if start < C else 2 * C)


@pytest.mark.parametrize("has_first", [None, [True, False, True], [False] * 3])
def test_first_layers_without_last_ones_are_replaced(store, has_first: list[bool] | None) -> None:
    """But for those of chunks that the caller has stored just now."""
    left, right, target = make_engine(seed=1), make_engine(seed=2), make_engine(seed=3)
    for group in LayerwiseStore(store, left, 1).groups[:-1]:
        group.put(TOKENS, BLOCKS)
    flags = None if has_first is None else np.array(has_first)
    layerwise = LayerwiseStore(store, right, 1)
    assert layerwise.finish_blocks(TOKENS, right, BLOCKS, has_first=flags) == len(TOKENS)
    assert LayerwiseStore(store, target, 1).load_blocks(TOKENS, target, BLOCKS) == len(TOKENS)
    for chunk, begin in enumerate(range(0, len(TOKENS), C)):
        end = min(begin + C, len(TOKENS))
        found, old, new = (tokens_of(engine, BLOCKS, begin, end) for engine in (target, left, right))
        is_kept = has_first is not None and has_first[chunk]
        assert torch.equal(found[:-1], old[:-1] if is_kept else new[:-1]) and torch.equal(found[-1], new[-1])


def test_layers_that_were_evicted_are_stored_again(store) -> None:
    engine = make_engine(seed=1)
    layerwise = filled(store, engine, len(TOKENS), 1)
    layerwise.groups[0].remove(TOKENS[:C])
    assert layerwise.store_blocks(TOKENS, engine, BLOCKS) == len(TOKENS)


def test_records_of_other_divisions_never_meet(store) -> None:
    engine = make_engine(seed=1)
    filled(store, engine, len(TOKENS), 2)
    assert store.lookup(TOKENS) == 0
    assert LayerwiseStore(store, engine, 1).lookup(TOKENS) == 0
    assert LayerwiseStore(store, engine, L).lookup(TOKENS) == 0
    assert LayerwiseStore(store, engine, 2).lookup(TOKENS) == len(TOKENS)


def test_remove_forgets_all_layers(store) -> None:
    engine = make_engine(seed=1)
    layerwise = filled(store, engine, len(TOKENS), 2)
    assert layerwise.remove(TOKENS) == 3
    assert layerwise.lookup(TOKENS) == 0 and not store.keys()


@pytest.mark.parametrize("num_layers", [1, 2])
def test_layers_are_loaded_as_they_come(store, num_layers: int) -> None:
    source, target = make_engine(seed=1), make_engine(seed=2)
    sender, receiver = LayerwiseStore(store, source, num_layers), LayerwiseStore(store, target, num_layers)
    arriving, whole = ArrivingStore(receiver, patience=60), len(TOKENS) // B * B
    results: list[int] = []
    with arriving.expect(TOKENS):
        thread = threading.Thread(target=lambda: results.append(arriving.load_blocks(TOKENS, target, BLOCKS)))
        thread.start()
        for end in range(C, whole + C, C):
            for group in sender.groups:
                group.put(TOKENS[: min(end, whole)], BLOCKS)
        thread.join(60)
    assert results == [whole]
    assert torch.equal(tokens_of(target, BLOCKS, 0, whole), tokens_of(source, BLOCKS, 0, whole))


def test_arguments_are_checked(store) -> None:
    engine = make_engine()
    with pytest.raises(TypeError, match="store must derive from kvpage.store.BlockStore, got object"):
        LayerwiseStore(object(), engine)
    with pytest.raises(TypeError, match="engine must be a CacheEngine, got object"):
        LayerwiseStore(store, object())
    for wrong in (0, -1):
        with pytest.raises(ValueError, match=f"num_layers must be an integer of at least 1, got {wrong}"):
            LayerwiseStore(store, engine, wrong)
    with pytest.raises(TypeError):
        LayerwiseStore(store, engine, 1.5)
    no_layers = CacheEngine(CacheConfig(B, 1), ModelConfig(10, 2, ("linear_attention",), torch.bfloat16))
    with pytest.raises(ValueError, match="engine must have layers, got none"):
        LayerwiseStore(store, no_layers)
    layerwise = LayerwiseStore(store, engine)
    for call in (layerwise.store_blocks, layerwise.load_blocks):
        with pytest.raises(ValueError, match="engine must be the one that the LayerwiseStore was made with"):
            call(TOKENS, make_engine(), BLOCKS)
    with pytest.raises(ValueError, match="block_table"):
        layerwise.store_blocks(TOKENS, engine, BLOCKS[:2])
    with pytest.raises(TypeError):
        layerwise.lookup(TOKENS, namespace="text")
    with pytest.raises(ValueError, match="engine must be the one"):
        ArrivingStore(layerwise).load_blocks(TOKENS, make_engine(), BLOCKS)


def test_layers_have_the_chunks_of_their_store_or_others(store) -> None:
    engine = make_engine()
    assert [store.layers(engine, size).chunk_size for size in (None, 1, C + 1)] == [C, 1, C + 1]
    with pytest.raises(ValueError, match="chunk_size must be an integer of at least 1, got 0"):
        store.layers(engine, 0)
    with pytest.raises(TypeError, match="chunk_size must be an integer"):
        store.layers(engine, 1.5)
    config, metadata = KVStoreConfig(C, ("memory://?size=4MiB",)), KVStoreMetadata("m", kv_dtype=torch.float16)
    message = r"kv_dtype of the store must be the engine's, torch.bfloat16, got torch.float16"
    with KVStore(config, metadata) as other, pytest.raises(ValueError, match=message):
        other.layers(engine)


@pytest.mark.parametrize("run", [(-1, 1), (0, 0), (1, 1), (2, 1), (0, L + 1), (L, L + 1)])
def test_a_slice_must_be_of_layers_that_are_there(run: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"layers must be some of \[0, 3\), got"):
        LayerSlice(make_engine(), *run)

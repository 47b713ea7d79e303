"""Chunks of several MiB on a disk, which go from the file straight to their places: exact, or a miss."""

from pathlib import Path

import pytest
import torch

from kvpage import CacheConfig, CacheEngine, ModelConfig
from kvpage.store import KVStore, KVStoreConfig, KVStoreMetadata, metadata_of
from kvpage.store.disk import segment as disk_segment

C, L, H, D = 32, 3, 8, 1024  # a chunk of fp32 has 6 MiB
TOKENS = list(range(2 * C + 5))
NAN = float("nan")


def make(path: Path, fmt: str = "vllm", codec: str = "raw") -> KVStore:
    config = KVStoreConfig(C, (f"disk://{path}?size=64MiB&segment=64MiB",), codec=codec, num_threads=2)
    return KVStore(config, KVStoreMetadata("m", fmt=fmt, kv_dtype=torch.float32))


def kv_of(fmt: str) -> torch.Tensor:
    tokens_heads = (len(TOKENS), H) if fmt == "vllm" else (H, len(TOKENS))
    return torch.arange(L * 2 * len(TOKENS) * H * D, dtype=torch.float32).view(L, 2, *tokens_heads, D)


@pytest.mark.parametrize("fmt", ["vllm", "huggingface"])
def test_tensors(tmp_path: Path, fmt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kv, dim, calls, read = kv_of(fmt), 2 if fmt == "vllm" else 3, [], disk_segment.read_stretches
    monkeypatch.setattr(disk_segment, "read_stretches", lambda *args: calls.append(args) or read(*args))
    with make(tmp_path, fmt) as store:
        store.store(TOKENS, kv)
        for num_skipped in (0, 3, C, C + 7):
            out = torch.full_like(kv, NAN).narrow(dim, num_skipped, len(TOKENS) - num_skipped)
            mask = torch.arange(len(TOKENS)) >= num_skipped
            found, _ = store.retrieve(TOKENS, mask, return_tuple=False, out=out)
            assert torch.equal(found, kv.narrow(dim, num_skipped, len(TOKENS) - num_skipped))
    assert len(calls) >= 6


@pytest.mark.parametrize("start", [0, 5, C])
def test_blocks(tmp_path: Path, start: int) -> None:
    model, cache = ModelConfig(D, H, ("full_attention",) * L, torch.float32), CacheConfig(16, 12, 0)
    source, target = CacheEngine(cache, model), CacheEngine(cache, model)
    for at, (full, empty) in enumerate(zip(source.gpu_cache, target.gpu_cache, strict=True)):
        full.copy_(torch.arange(full.numel(), dtype=torch.float32).view(full.shape) + at)
        empty.fill_(NAN)
    table, other = [3, 0, 11, 5, 8], [1, 9, 4, 2, 10]
    config = KVStoreConfig(C, (f"disk://{tmp_path}?size=64MiB&segment=64MiB",), num_threads=2)
    with KVStore(config, metadata_of(source, "m")) as store:
        assert store.store_blocks(TOKENS, source, table) == len(TOKENS)
        assert store.load_blocks(TOKENS, target, other, start) == len(TOKENS)
    for full, empty in zip(source.gpu_cache, target.gpu_cache, strict=True):
        wanted = torch.full_like(empty, NAN)
        for token in range(start, len(TOKENS)):
            wanted[:, other[token // 16], token % 16] = full[:, table[token // 16], token % 16]
        assert torch.equal(wanted.isnan(), empty.isnan()) and torch.equal(wanted.nan_to_num(), empty.nan_to_num())


@pytest.mark.parametrize("damage", ["bit", "end"])
def test_damaged_files_are_misses(tmp_path: Path, damage: str) -> None:
    kv = kv_of("vllm")
    with make(tmp_path) as store:
        store.store(TOKENS[:C], kv[:, :, :C].contiguous())  # alone: of two threads either may reserve its place first
        store.store(TOKENS, kv)
        (file,) = tmp_path.glob("*.segment")
        with open(file, "r+b") as data:
            if damage == "bit":  # in the second chunk
                data.seek((9 << 20) + 5)
                byte = data.read(1)[0]
                data.seek((9 << 20) + 5)
                data.write(bytes([byte ^ 4]))
            else:
                data.truncate(9 << 20)
        out = torch.full_like(kv, NAN)
        found, mask = store.retrieve(TOKENS, return_tuple=False, out=out)
        assert int(mask.sum()) == C and torch.equal(found, kv[:, :, :C]) and torch.equal(out[:, :, :C], kv[:, :, :C])
        if damage == "bit":
            assert store.stats().corrupt_records == 1
        assert store.lookup(TOKENS) == C

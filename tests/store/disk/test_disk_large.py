"""Chunks of several MiB on a disk, which go from the file straight to their places: exact, or a miss."""

from pathlib import Path

import pytest
import torch

from kvpage.store import KVStore, KVStoreConfig, KVStoreMetadata
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

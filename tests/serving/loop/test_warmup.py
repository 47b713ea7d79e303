"""Warm-up compiles all kernels that steps ask for: of every length, prefix, portion, mix and rule."""

import os
from contextlib import closing

import numpy as np
import pytest
import torch
from support.models import make_model

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter replaces the compiler", allow_module_level=True)

from support.kernel_trace import (  # noqa: E402
    compilations,
    compiled_by_warmup,
    kernels_asked,
    keys_asked_by,
    on_kernels,
)

from kvpage import CacheConfig  # noqa: E402
from kvpage.ops.cuda import chunks  # noqa: E402
from kvpage.serving import Engine, EngineConfig, SamplingParams  # noqa: E402
from kvpage.store import KVStore, KVStoreConfig, KVStoreMetadata, metadata_of  # noqa: E402
from kvpage.store.load import block_chunks  # noqa: E402
from kvpage.store.load.block_chunks import BlockChunks, DeviceBlockChunk  # noqa: E402

LONGEST = 2048
LIMITS = {"max_num_seqs": 6, "max_num_batched_tokens": 256}
CASES = {
    "llama": ({"head_dim": 128, "num_hidden_layers": 1}, {}, {}),
    "gemma2": ({"head_dim": 128}, {}, {}),
    "gpt2": ({"n_layer": 1, "n_positions": LONGEST}, {}, {}),
    "qwen3": ({"head_dim": 128}, {"cache_dtype": "fp8_e4m3"}, {}),
    "deepseek_v3": ({"kv_lora_rank": 24}, {"backend": "mla"}, {}),
    "gpt_oss": ({"head_dim": 64}, {}, {"num_window_blocks": 200}),
}


def make_engine(kind: str) -> Engine:
    fields, of_cache, options = CASES[kind]
    model = make_model(kind, max_position_embeddings=LONGEST, **fields).bfloat16()
    return on_kernels(Engine.from_model(model, EngineConfig(CacheConfig(16, 800, **of_cache), **LIMITS, **options)))


def add_random(engine: Engine, rng: np.random.Generator, shared: np.ndarray) -> None:
    """A prompt of any length, most of them short; a third begins with tokens that others have, too."""
    length = int(rng.integers(1, (20, 200, LONGEST - 40)[rng.integers(3)]))
    prompt = rng.integers(2, 190, length)
    if rng.random() < 0.3:
        prompt[: length * 3 // 4] = shared[: length * 3 // 4]
    rules = [{}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9, "top_k": 20}, {"frequency_penalty": 0.5}]
    params = SamplingParams(max_tokens=int(rng.integers(1, 20)), **{"temperature": 0.0, **rules[rng.integers(4)]})
    engine.add_request(prompt, params)


def run_trace(engine: Engine, num_steps: int, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    shared = rng.integers(2, 190, LONGEST)
    for _ in range(num_steps):
        while len(engine.scheduler.waiting) + len(engine.scheduler.running) < rng.integers(1, 8):
            add_random(engine, rng, shared)
        engine.step()


@pytest.mark.parametrize("kind", CASES)
def test_steps_after_warmup_compile_nothing(kind: str) -> None:
    engine = make_engine(kind)
    with kernels_asked(), torch.no_grad():
        compiled = compiled_by_warmup(engine)
        asked = keys_asked_by(lambda: run_trace(engine, 200 if kind == "llama" else 60))
    assert asked <= compiled, asked - compiled
    assert engine.stats().num_generated_tokens > 100


def move_by_kernels(patch: pytest.MonkeyPatch) -> None:
    """Let chunks of blocks in host memory ask for a GPU's kernels."""
    for name in ("store_chunk", "load_chunk"):
        move = getattr(chunks, name)

        def moved(caches, ids, chunk, layout, start, fmt, move=move) -> None:
            move(caches, ids, start, chunk if fmt == "vllm" else chunk.transpose(2, 3), layout)

        patch.setattr(block_chunks, name, moved)


def move_chunks(engine: Engine, metadata: KVStoreMetadata) -> None:
    """Store and load chunks of some lengths, wholly and in part, of one layer and of all."""
    blocks = BlockChunks(engine.cache, range(20), metadata)
    (unit,) = blocks.units
    for begin, end in ((0, 64), (64, 128), (128, 129), (0, 15), (16, 33)):
        for first in (begin, (begin + end) // 2):
            chunk = DeviceBlockChunk(blocks, begin, end, first, end)
            for layers in (unit.caches, unit.caches[:1]):
                data = torch.zeros(len(layers) * unit.layer_bytes(end - begin), dtype=torch.uint8)
                chunk._gather(unit, layers, data)
                chunk._scatter(unit, layers, data)


@pytest.mark.parametrize("fmt", ["vllm", "huggingface"])
@pytest.mark.parametrize("kind", ["gemma2", "qwen3", "deepseek_v3"])
def test_chunks_of_a_store_after_warmup_compile_nothing(monkeypatch, kind: str, fmt: str) -> None:
    engine = make_engine(kind)
    metadata = metadata_of(engine.cache, "m", fmt=fmt)
    with KVStore(KVStoreConfig(64, ("memory://?size=4MiB",)), metadata) as store, closing(engine), kernels_asked():
        move_by_kernels(monkeypatch)
        without = compiled_by_warmup(engine)
        engine.use_store(store)
        compiled = compiled_by_warmup(engine)
        asked = keys_asked_by(lambda: move_chunks(engine, metadata))
    assert len(asked) == 2 and asked <= compiled and not asked & without


@pytest.mark.parametrize("kind", ["qwen3", "deepseek_v3"])
def test_what_asks_for_kernels_of_chunks_leaves_all_blocks(kind: str) -> None:
    """A second warm-up launches the kernels that the first one has compiled."""
    caches = make_engine(kind).cache
    bits = [cache.view(torch.uint8).fill_(77) for cache in caches.gpu_cache]
    for fmt in ("vllm", "huggingface"):
        block_chunks.move_padding(caches, fmt)
    assert all(bool((each == 77).all()) for each in bits)


@pytest.mark.skipif(not hasattr(triton, "knobs"), reason="Triton tells of compilations from 3.4 on")
def test_triton_compiles_nothing_after_warmup(monkeypatch, tmp_path) -> None:
    """Nothing is only noted here: each launch goes to Triton, whose cache is empty at first."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    engine = make_engine("llama")
    with kernels_asked() as device, torch.no_grad():
        with compilations() as of_warmup:
            engine.warmup(lambda num: None)
        device.launches.clear()
        with compilations() as of_steps:
            run_trace(engine, 200)
        assert of_steps == []
        assert {name for name, *_ in device.launches} <= set(of_warmup)
    assert engine.stats().num_generated_tokens > 100

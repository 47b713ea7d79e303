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
from kvpage.blend import BlendConfig  # noqa: E402
from kvpage.ops.cuda import chunks  # noqa: E402
from kvpage.serving import Engine, EngineConfig, SamplingParams  # noqa: E402
from kvpage.serving.loop.graphs.padding import PaddedSteps, StepLimits  # noqa: E402
from kvpage.serving.loop.graphs.warmup import rehearse_blending  # noqa: E402
from kvpage.serving.loop.ranks.rank_caches import RankCaches  # noqa: E402
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


BLENDS = {
    "llama": BlendConfig(),
    "gemma2": BlendConfig(check_layer=1, metric="kv", filters=[(0, 0.5)]),
    "qwen3": BlendConfig(uses_sensitivity=False),
}


def make_engine(kind: str, blend: BlendConfig | None = None) -> Engine:
    fields, of_cache, options = CASES[kind]
    model = make_model(kind, max_position_embeddings=LONGEST, **fields).bfloat16()
    config = EngineConfig(CacheConfig(16, 800, **of_cache), blend=blend, **LIMITS, **options)
    return on_kernels(Engine.from_model(model, config))


def add_random(engine: Engine, rng: np.random.Generator, shared: np.ndarray) -> None:
    """A prompt of any length, most of them short; a third begins with tokens that others have, too."""
    length = int(rng.integers(1, (20, 200, LONGEST - 40)[rng.integers(3)]))
    prompt = rng.integers(2, 190, length)
    if rng.random() < 0.3:
        prompt[: length * 3 // 4] = shared[: length * 3 // 4]
    rules = [{}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9, "top_k": 20}, {"frequency_penalty": 0.5}]
    params = SamplingParams(max_tokens=int(rng.integers(1, 20)), **{"temperature": 0.0, **rules[rng.integers(4)]})
    engine.add_request(prompt, params)


def add_blended(engine: Engine, rng: np.random.Generator, texts: list[np.ndarray]) -> None:
    """A prompt of some texts, a third of which are new, after a beginning and before a question of its own."""
    every = [*texts, *(rng.integers(2, 190, rng.integers(1, 40)) for _ in texts[::2])]
    parts = [rng.integers(2, 190, 3), *(every[i] for i in rng.choice(len(every), rng.integers(1, 4), replace=False))]
    prompt = np.concatenate([*parts, rng.integers(2, 190, rng.integers(1, 30))])
    params = SamplingParams(max_tokens=int(rng.integers(1, 20)))
    engine.add_request(prompt, params, blend=True, segments=[*map(len, parts)])


def run_trace(engine: Engine, num_steps: int, seed: int = 0, texts: list[np.ndarray] | None = None) -> None:
    """Random requests. texts: most prompts are blended from these."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(2, 190, LONGEST)
    for _ in range(num_steps):
        while len(engine.scheduler.waiting) + len(engine.scheduler.running) < rng.integers(1, 8):
            if texts is not None and rng.random() < 0.8:
                add_blended(engine, rng, texts)
            else:
                add_random(engine, rng, shared)
        engine.step()


def run_blended(engine: Engine, num_steps: int, seed: int = 1) -> None:
    """Keep some texts as segments, and run random requests that blend these, and others."""
    rng = np.random.default_rng(seed)
    texts = [rng.integers(2, 190, length) for length in (1, 5, 15, 16, 17, 90, 200)]
    engine.warm_segments(texts)
    run_trace(engine, num_steps, seed, texts)


@pytest.mark.parametrize("kind", CASES)
def test_steps_after_warmup_compile_nothing(kind: str) -> None:
    engine = make_engine(kind)
    with kernels_asked(), torch.no_grad():
        compiled = compiled_by_warmup(engine)
        asked = keys_asked_by(lambda: run_trace(engine, 200 if kind == "llama" else 60))
    assert asked <= compiled, asked - compiled
    assert engine.stats().num_generated_tokens > 100


@pytest.mark.parametrize("kind", BLENDS)
def test_blended_steps_after_warmup_compile_nothing(kind: str) -> None:
    engine = make_engine(kind, BLENDS[kind])
    with closing(engine), kernels_asked(), torch.no_grad():
        compiled = compiled_by_warmup(engine)
        asked = keys_asked_by(lambda: run_blended(engine, 100))
        num_blends = engine.stats().blend.num_blends
    assert asked <= compiled, asked - compiled
    assert {name for name, *_ in asked} >= {"mix_rows_kernel", "row_deviation_kernel", "gather_cache_kernel"}
    assert num_blends > 20


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


def test_what_asks_for_kernels_of_blending_leaves_all_blocks() -> None:
    engine = make_engine("gemma2", BLENDS["gemma2"])
    with closing(engine), kernels_asked(), torch.no_grad():
        bits = [cache.view(torch.uint8).fill_(77) for cache in engine.cache.gpu_cache]
        steps = PaddedSteps(engine.debug.runner, RankCaches(engine.cache))
        rehearse_blending(steps, StepLimits(6, 2, 40), engine.debug.blend)
    assert all(bool((each == 77).all()) for each in bits)


@pytest.mark.skipif(not hasattr(triton, "knobs"), reason="Triton tells of compilations from 3.4 on")
@pytest.mark.parametrize("blend, run", [(None, run_trace), (BLENDS["llama"], run_blended)], ids=["plain", "blended"])
def test_triton_compiles_nothing_after_warmup(monkeypatch, tmp_path, blend, run) -> None:
    """Nothing is only noted here: each launch goes to Triton, whose cache is empty at first."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    engine = make_engine("llama", blend)
    with closing(engine), kernels_asked() as device, torch.no_grad():
        with compilations() as of_warmup:
            engine.warmup(lambda num: None)
        device.launches.clear()
        with compilations() as of_steps:
            run(engine, 200)
        launched = {name for name, *_ in device.launches}
        assert of_steps == [] and launched <= set(of_warmup)
        assert blend is None or {"mix_rows_kernel", "row_deviation_kernel"} <= launched
    assert engine.stats().num_generated_tokens > 100

"""Engines of random bytes for tests of a store's blocks, and their bytes."""

import torch

from kvpage import CacheConfig, CacheEngine, KVScales, ModelConfig, ops
from kvpage.store import metadata_of
from kvpage.store.load.block_chunks import BlockChunks

B, C, L = 4, 12, 3
TOKENS = list(range(100, 131))  # 31 tokens: 8 blocks, chunks of 12, 12 and 7


def make_engine(num_blocks: int = 24, seed: int = 0, scales: list[KVScales] | None = None, **fields) -> CacheEngine:
    """Random bytes in all blocks, whatever they mean."""
    use_mla = fields.get("backend") == "mla"
    model = ModelConfig(24 if use_mla else 10, 1 if use_mla else 2, ("full_attention",) * L, torch.bfloat16, use_mla)
    engine = CacheEngine(CacheConfig(B, num_blocks, **fields), model, kv_scales=scales)
    generator = torch.Generator().manual_seed(seed)
    for layer in engine.gpu_cache:
        random = torch.randint(0, 250, (layer.numel() * layer.element_size(),), generator=generator, dtype=torch.uint8)
        layer.copy_(random.view(layer.dtype).view(layer.shape))
    return engine


def tokens_of(engine: CacheEngine, block_ids: list[int], start: int, end: int) -> list[torch.Tensor]:
    """The raw bytes of the tokens: [layers, parts, tokens, bytes]."""
    chunks = BlockChunks(engine, block_ids, metadata_of(engine, "m"))
    shape = chunks.shape(end - start)
    chunk = torch.zeros(shape, dtype=engine.layout.dtype)
    ops.store_chunk(engine.gpu_cache, torch.tensor(block_ids, dtype=torch.int32), chunk, engine.layout, start)
    return chunk.view(torch.uint8)


def all_bytes(engine: CacheEngine) -> list[torch.Tensor]:
    return [layer.contiguous().view(torch.uint8).clone() for layer in engine.gpu_cache]

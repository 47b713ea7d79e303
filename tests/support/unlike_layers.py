"""Engines whose layers have heads and sizes of their own, and what their blocks hold, read row by row."""

import torch

from kvpage import CacheConfig, CacheEngine
from kvpage.layout.config import ModelConfig
from kvpage.layout.layer_shape import LayerShape

B = 4
SHAPES = {
    "gemma4": (LayerShape(4, 8), LayerShape(4, 8), LayerShape(1, 16), None, None, LayerShape(4, 8), LayerShape(1, 16)),
    "mimo": (LayerShape(1, 12, 8), *[LayerShape(2, 12, 8)] * 2, LayerShape(1, 12, 8)),
    "narrow V": (LayerShape(2, 12, 8),) * 3,
    "wide V": (LayerShape(2, 4, 12), LayerShape(2, 4), LayerShape(2, 4, 1)),
}
SHARED = {"gemma4": ((3, 1), (4, 2))}
PLACES = [
    {"backend": backend, "kv_layout": kv_layout, "layer_layout": layer_layout}
    for backend, kv_layout in (("flash", "NHD"), ("flash", "HND"), ("flashinfer", "NHD"), ("paged", "NHD"))
    for layer_layout in ("separate", "packed")
]


def model_config(kind: str, dtype: torch.dtype = torch.bfloat16) -> ModelConfig:
    shapes = SHAPES[kind]
    return ModelConfig.of_shapes(shapes, ("full_attention",) * len(shapes), dtype, SHARED.get(kind, ()))


def own_shapes(kind: str) -> list[LayerShape]:
    return [shape for shape in SHAPES[kind] if shape is not None]


def make_engine(kind: str, num_blocks: int = 12, num_cpu_blocks: int = 0, seed: int = 0, **fields) -> CacheEngine:
    """Random bits in all blocks of both tiers."""
    engine = CacheEngine(CacheConfig(B, num_blocks, num_cpu_blocks, **fields), model_config(kind))
    generator = torch.Generator().manual_seed(seed)
    for layer in (*engine.gpu_cache, *engine.cpu_cache):
        random = torch.randint(0, 250, (layer.numel() * layer.element_size(),), generator=generator, dtype=torch.uint8)
        layer.copy_(random.view(layer.dtype).view(layer.shape))
    return engine


def blocks_of(engine: CacheEngine, caches: list[torch.Tensor]) -> list[torch.Tensor]:
    """The bytes of each layer's blocks: [num_blocks, bytes]."""
    layers = zip(caches, engine.layouts, strict=True)
    return [
        cache.movedim(layout.block_dim, 0).contiguous().flatten(1).view(torch.uint8).clone() for cache, layout in layers
    ]


def rows_of(engine: CacheEngine, block_ids: list[int], start: int, end: int) -> list[torch.Tensor]:
    """The bytes of the tokens [start, end) of a table, K and then V of each layer: [tokens, bytes]."""
    positions = torch.arange(start, end)
    places = torch.tensor(block_ids)[positions // B], positions % B
    rows = []
    for cache, layout in zip(engine.gpu_cache, engine.layouts, strict=True):
        for view, size in zip(layout.views(cache), (layout.head_size, layout.head_size_v), strict=True):
            rows.append(view.read(*places, size).flatten(1).view(torch.uint8))
            if view.scales is not None:
                rows.append(view.scales[places].contiguous().view(torch.uint8))
    return rows

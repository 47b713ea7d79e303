"""The heads and sizes of each layer's K and V, and which layers share them, as a model's attention gets them.

    layer 0   K, V of its own          [2 tokens, 16 heads, 256]
    layer 1   K, V of its own          [2 tokens,  4 heads, 512]
    layer 2   the tensors of layer 0   attends over the blocks of layer 0, and has none

A config does not always say it, and ranks may have some of the heads.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import numpy as np
import torch

from kvpage.cache.cache_engine import CacheEngine
from kvpage.layout.attention import Attention
from kvpage.layout.config import CacheConfig, DeviceConfig, ModelConfig
from kvpage.layout.layer_shape import LayerShape
from kvpage.serving.model.kv_shape import shape_of_rows
from kvpage.serving.model.probe import unquantized
from kvpage.serving.model.runner import ModelRunner
from kvpage.serving.model.step import PackedTokens, Step

_NUM_TOKENS = 2  # compiled code for one token would serve no other number


class _SeenRows:
    """A step's work that writes nothing: it keeps each layer's K and V. Kept tensors lie in memory of their own."""

    def __init__(self) -> None:
        self.rows: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def hooks(self) -> AbstractContextManager[object]:
        return nullcontext()

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int, attention: Attention
    ) -> torch.Tensor:
        self.rows[layer] = key, value
        return query.new_zeros(*query.shape[:2], value.shape[2])


def with_seen_shapes(runner: ModelRunner, cache_config: CacheConfig, config: ModelConfig) -> ModelConfig:
    """Return the config with the shapes that this rank's attention gets. All ranks call it at once.

    config: of the layers that attend; its heads and sizes are not relied on. ValueError for K and V of a layer with
    unlike heads, and for a model that cannot be served from blocks.
    """
    rows = _seen_rows(runner, cache_config, config)
    sources, shared = {_place(pair): layer for layer, pair in reversed(rows.items())}, list[tuple[int, int]]()
    shapes: list[LayerShape | None] = [None] * len(config.layer_types)
    for layer, pair in rows.items():
        shapes[layer] = shape_of_rows(type(runner.model).__name__, layer, *pair)
        source = sources[_place(pair)]
        shared += [] if source == layer else [(layer, source)]
    return ModelConfig.of_shapes(shapes, config.layer_types, config.dtype, shared)


def _place(pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[object, ...]:
    return tuple((rows.data_ptr(), rows.shape, rows.stride()) for rows in pair)


def _seen_rows(
    runner: ModelRunner, cache_config: CacheConfig, config: ModelConfig
) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Return K and V of each layer, [tokens, heads, size], in the order of the layers' calls."""
    few = replace(unquantized(cache_config, config), num_gpu_blocks=_NUM_TOKENS, num_cpu_blocks=0)
    engine = CacheEngine(few, config, device_config=DeviceConfig(runner.model.device))
    starts, ends, seen = [0], [_NUM_TOKENS], _SeenRows()
    packed = PackedTokens(np.zeros(_NUM_TOKENS, np.int32), starts, ends, np.arange(_NUM_TOKENS))
    table = np.arange(_NUM_TOKENS, dtype=np.int32)[None]
    step = Step.make(engine, np.arange(_NUM_TOKENS), table, starts, ends, packed)
    runner.forward(packed, replace(step, blend=seen))
    return seen.rows

"""LayerSlice: some layers of a CacheEngine, as if they were all. LayerCaches: the members of both.

CacheEngine   layer 0 | 1 | 2 | 3 | 4 | 5
LayerSlice            [ 1   2   3 )            the same tensors; nothing is copied
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from kvpage.cache.cache_engine import CacheEngine
from kvpage.layout.cache_layout import CacheLayout
from kvpage.layout.kv_scales import KVScales


class LayerCaches(Protocol):
    """Caches of layers on one device. A CacheEngine has them, and a LayerSlice."""

    device: torch.device
    gpu_cache: list[torch.Tensor]

    @property
    def layer_ids(self) -> Sequence[int]:
        """The layer in the whole model of each cache."""

    @property
    def kv_scales(self) -> Sequence[KVScales] | None:
        """The scales of each layer, or None."""

    @property
    def layouts(self) -> Sequence[CacheLayout]:
        """The layout of each cache."""

    @property
    def layout(self) -> CacheLayout:
        """The layout of the first cache. All others have its dtype, and blocks of as many tokens."""

    @property
    def numerics(self) -> str:
        """The name of what computes K and V bit by bit; empty where their bits are not promised."""


class LayerSlice:
    """Layers [first, last) of an engine, counted from 0. It keeps the engine.

    Args:
        engine: The engine.
        first: The first layer.
        last: The layer after the last one.

    Raises:
        ValueError: The engine has no such layers, or `last` is not after `first`.
    """

    def __init__(self, engine: CacheEngine, first: int, last: int) -> None:
        if not 0 <= first < last <= len(engine.gpu_cache):
            raise ValueError(f"layers must be some of [0, {len(engine.gpu_cache)}), got [{first}, {last})")
        self.engine, self.device = engine, engine.device
        self.layouts = engine.layouts[first:last]
        self.layout = self.layouts[0]
        self.gpu_cache = engine.gpu_cache[first:last]
        self.layer_ids = tuple(engine.layer_ids[first:last])
        self.kv_scales = None if engine.kv_scales is None else engine.kv_scales[first:last]

    @property
    def numerics(self) -> str:
        """That of the engine."""
        return self.engine.numerics

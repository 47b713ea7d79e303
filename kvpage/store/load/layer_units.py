"""LayerUnit: neighbouring layers of one layout, whose rows are all of one size, as one part of a chunk's payload.

    layers       0    1    2        3         4    5
    heads        4    4    1        1+        4    4             of layer 3, V has another size than K
    units      [ K V, K V ][ K V ][ K ][ V ][ K V, K V ]         bytes of a payload, in this order

Where all layers are alike there is one unit.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import torch

import kvpage._C as _C
from kvpage.layout.cache_layout import SCALE_BYTES, CacheLayout
from kvpage.ops.chunks import native_chunk_parts
from kvpage.store.records.record import Shape

if TYPE_CHECKING:
    from kvpage.cache.layer_slice import LayerCaches


@dataclass(frozen=True, slots=True)
class LayerUnit:
    """Some layers, or one part of a layer.

    first: the first layer. caches: of each layer, of `layout`; of one part a view. num_parts: of each layer, all with
    rows of `row_size` elements in a payload.
    """

    first: int
    caches: list[torch.Tensor]
    layout: CacheLayout
    num_parts: int
    row_size: int

    @property
    def layer_token_size(self) -> int:
        """Elements of a token in one layer."""
        return self.num_parts * self.layout.num_kv_heads * self.row_size

    @property
    def token_size(self) -> int:
        """Elements of a token in all layers of the unit."""
        return len(self.caches) * self.layer_token_size

    def layer_bytes(self, num_tokens: int) -> int:
        """Return the bytes of `num_tokens` tokens in one layer."""
        return num_tokens * self.layer_token_size * self.layout.dtype.itemsize

    def shape(self, num_tokens: int, fmt: str) -> Shape:
        """Return the shape of the unit's part of a payload."""
        rows = num_tokens, self.layout.num_kv_heads
        first, second = rows if fmt == "vllm" else rows[::-1]
        return len(self.caches), self.num_parts, first, second, self.row_size

    def plan(self, num_tokens: int, fmt: str, stretch_bytes: int) -> _C.ChunkPlan:
        """Return the plan for chunks of `num_tokens` tokens in host memory."""
        layout, shape = self.layout, self.shape(num_tokens, fmt)
        payload = torch.empty(shape, dtype=layout.dtype, device="meta")  # whose addresses count from 0
        parts = native_chunk_parts(self.caches, payload if fmt == "vllm" else payload.transpose(2, 3), layout)
        moves_per_part = len(parts) // (shape[0] * shape[1])
        sizes = layout.num_kv_heads, layout.num_blocks(self.caches[0]), layout.block_size, self.layer_bytes(num_tokens)
        return _C.ChunkPlan(parts, (shape[0], moves_per_part, num_tokens, *sizes, stretch_bytes))


def units_of(layouts: Sequence[CacheLayout], caches: Sequence[torch.Tensor]) -> list[LayerUnit]:
    """Return the units of some layers, of which each has a layout and a cache."""
    units, first = list[LayerUnit](), 0
    for layout, run in groupby(layouts):
        last = first + len(list(run))
        units += _units_of(first, caches[first:last], layout)
        first = last
    return units


def _units_of(first: int, caches: Sequence[torch.Tensor], layout: CacheLayout) -> list[LayerUnit]:
    if layout.value_size is None:
        num_parts = sum(view is not None for view in layout.views(caches[0]))
        return [LayerUnit(first, list(caches), layout, num_parts, _row_size(layout))]
    halves = [layout.part(index) for index in range(len(layout.row_sizes))]
    return [
        LayerUnit(layer, [rows], half, 1, _row_size(half))
        for layer, cache in enumerate(caches, first)
        for rows, half in zip(torch.split(cache, list(layout.row_sizes), dim=-1), halves, strict=True)
    ]


def _row_size(layout: CacheLayout) -> int:
    return layout.padded_head_size + SCALE_BYTES if layout.has_token_scales else layout.head_size


def stretch_bytes_of(units: Sequence[LayerUnit], num_tokens: int) -> int:
    """Return the bytes of each stretch of a payload: as many as divide every unit's layers."""
    return math.gcd(*(unit.layer_bytes(num_tokens) for unit in units))


def row_layout_of(engine: "LayerCaches") -> str:
    """Return the meaning of a payload's bytes beyond its dtype; empty for rows without more, of layers all alike."""
    layout = engine.layout
    parts = ["latent"] if layout.backend == "mla" else []
    if layout.has_token_scales:
        parts.append(f"int8[{layout.padded_head_size}] + fp32 scale")
    if len(set(engine.layouts)) > 1 or layout.value_size is not None:
        parts.append(
            "layers " + ",".join(f"{_shape_word(shape)}*{len(list(run))}" for shape, run in groupby(engine.layouts))
        )
    return " ".join(parts)


def _shape_word(layout: CacheLayout) -> str:
    of_values = "" if layout.value_size is None else f"+{layout.value_size}"
    return f"{layout.num_kv_heads}x{layout.head_size}{of_values}"

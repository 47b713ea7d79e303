"""ViewLayout: the layout of a cache that no backend laid out, made of given views.

It has the methods of a CacheLayout that the operations on tokens call. So they work on K and V that are two tensors:

    key_cache ──► KVView ─┐
                          ├─► ViewLayout ─► ops.reshape_and_cache(key, value, key_cache, slots, layout)
    value_cache ► KVView ─┘
"""

import weakref
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from kvpage.layout.cache_layout import CacheLayout
from kvpage.layout.kv_scales import FP8_DTYPES
from kvpage.layout.kv_view import KVView


@dataclass(frozen=True, slots=True)
class ViewLayout:
    """Sizes and places of the views. The `cache` that goes with it is K's rows; the place of V's is in the layout.

    Two are equal if facts about calls with the one hold for calls with the other. It holds no tensor, so a memory of
    calls keeps no cache alive. The maker of the views must hold them as long as they are used.

    head_size: the most elements of a head that may be written or read, in either part.
    """

    dtype: torch.dtype
    block_size: int
    num_kv_heads: int
    head_size: int
    geometry: tuple[Any, ...]  # shapes and strides of K and V, and the bytes from K's address to V's
    _rows: tuple["weakref.ref[torch.Tensor] | None", ...] = field(compare=False, repr=False)

    block_dim = 0
    has_token_scales = False

    @property
    def is_quantized(self) -> bool:
        return self.dtype in FP8_DTYPES

    @property
    def padded_head_size(self) -> int:
        return self.head_size

    @property
    def head_size_v(self) -> int:
        return self.head_size

    def num_blocks(self, cache: torch.Tensor) -> int:
        return cache.shape[0]

    def validate(self, cache: torch.Tensor, name: str = "cache") -> None:
        """Check nothing: the views were made of the given tensors."""

    def views(self, cache: torch.Tensor) -> tuple[KVView, KVView | None]:
        key, value = (None if row is None else row() for row in self._rows)
        assert key is not None, "the views must outlive their layout's use"
        return KVView(key), None if value is None else KVView(value)


def layout_of(key: KVView, value: KVView | None, head_size: int) -> CacheLayout:
    """Return the layout of views of one dtype without token scales; value is None where there is no value part.

    It is a ViewLayout, under the type that the operations name.
    """
    rows, parts = key.rows, [key.rows] if value is None else [key.rows, value.rows]
    geometry = (*((part.shape, part.stride(), part.data_ptr() - rows.data_ptr()) for part in parts),)
    refs = (weakref.ref(rows), None if value is None else weakref.ref(value.rows))
    return cast(CacheLayout, ViewLayout(rows.dtype, rows.shape[1], rows.shape[2], head_size, geometry, refs))

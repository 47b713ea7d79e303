"""ViewLayout: the layout of a cache that no backend laid out, made of the views that somebody has.

It answers what the operations on tokens ask of a CacheLayout, so that they work on K and V that come as two tensors:

    key_cache ──► KVView ─┐
                          ├─► ViewLayout ─► token_ops.reshape_and_cache(key, value, key_cache, slots, layout)
    value_cache ► KVView ─┘
"""

from dataclasses import dataclass
from typing import cast

import torch

from kvpage.kv_scales import FP8_DTYPES
from kvpage.kv_view import KVView
from kvpage.layout import CacheLayout


@dataclass(frozen=True, slots=True, eq=False)
class ViewLayout:
    """The views themselves, and names for their sizes. The `cache` that goes with it is a tensor whose first dimension
    counts blocks, of the views' dtype and device; what is in it is not looked at.

    key, value: of one dtype; value is None where there is no value part. No scales a token.
    head_size: the most elements of a head that may be written or read, in either.
    """

    key: KVView
    value: KVView | None
    head_size: int

    block_dim = 0
    has_token_scales = False

    @property
    def block_size(self) -> int:
        return self.key.rows.shape[1]

    @property
    def num_kv_heads(self) -> int:
        return self.key.rows.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        return self.key.rows.dtype

    @property
    def is_quantized(self) -> bool:
        return self.dtype in FP8_DTYPES

    @property
    def padded_head_size(self) -> int:
        return self.head_size

    def num_blocks(self, cache: torch.Tensor) -> int:
        return cache.shape[0]

    def validate(self, cache: torch.Tensor, name: str = "cache") -> None:
        """Nothing is left to check: the views were made of what was given."""

    def views(self, cache: torch.Tensor) -> tuple[KVView, KVView | None]:
        return self.key, self.value


def layout_of(key: KVView, value: KVView | None, head_size: int) -> CacheLayout:
    """A ViewLayout, under the type that the operations name."""
    return cast(CacheLayout, ViewLayout(key, value, head_size))

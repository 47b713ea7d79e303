"""BoundCache: one layer's cache together with its layout and scales, checked once and then taken as it is.

    tensor, layout, scales ─► checked ─► K's and V's views ─► native descriptor
                                         one look at each call: is the tensor still the same memory?

A step of a model calls the operations once a layer. To derive the layout of the same tensor again at each of these
calls takes longer than a small step's work.
"""

from typing import Any, NamedTuple, Protocol

import torch

import kvpage._C as _C
from kvpage.checks.tensors import check_writable
from kvpage.layout.attention import Attention
from kvpage.layout.cache_layout import CacheLayout
from kvpage.layout.kv_scales import KVScales
from kvpage.layout.kv_view import KVView
from kvpage.ops.args.tokens import BITS, CODECS, ROW_TYPES, check_cache, check_scales, native_blocks, row_dtypes

NO_SCALE = (0, 0)


class NativeCache(NamedTuple):
    """K's and V's blocks as the extension takes them; addresses of scales are 0 where there are none.

    The value's are the key's where the cache has no value part.
    """

    key_blocks: _C.KVPart
    value_blocks: _C.KVPart
    key_scale: tuple[int, int]  # address, stride in elements
    value_scale: tuple[int, int]
    row_type: int
    codec: int


class AttentionOfOthers(Protocol):
    """Attention by a library, see kvpage.ops.cuda.libraries."""

    @property
    def name(self) -> str:
        """The library's name."""

    def attend(
        self, query: torch.Tensor, cache: "BoundCache", sequences: Any, attention: Attention
    ) -> torch.Tensor | None:
        """Return attention over blocks, or None where kvpage's own is to compute it."""

    def plan_for_graph(self, sequences: Any, cache: "BoundCache") -> bool:
        """Plan decoding for a graph; return whether the graph may hold the library's calls."""

    def plan_again(self, sequences: Any, seq_lens: list[int]) -> None:
        """Renew these plans for other lengths, before a replay."""


class BoundCache:
    """One layer's cache, bound to its layout and scales.

    It keeps the tensor alive and owns no memory. The operations take it in place of a tensor with a layout.

    Args:
        tensor: The cache, of the layout's generic shape.
        layout: How the tensor is to be read.
        scales: Scales of 8-bit floats; None means 1.

    Attributes:
        library: Attends in place of kvpage's kernel; None where nothing does.

    Raises:
        TypeError: An argument is of another type.
        ValueError: The tensor is not of this layout, or not on a CPU or a CUDA device, or the scales do not fit.
    """

    __slots__ = (
        "_addresses",
        "_geometry",
        "_place",
        "_scale_numbers",
        "device",
        "host_forms",
        "is_cuda",
        "is_writable",
        "key",
        "layout",
        "library",
        "native",
        "row_dtypes",
        "scales",
        "shape",
        "tensor",
        "value",
        "value_size",
    )

    def __init__(self, tensor: torch.Tensor, layout: CacheLayout, scales: KVScales | None = None) -> None:
        check_cache(tensor, layout)
        check_scales(scales, tensor, layout)
        self.tensor, self.layout, self.scales = tensor, layout, scales
        self.key, self.value = layout.views(tensor)
        self.device, self.is_cuda = tensor.device, tensor.is_cuda
        self.row_dtypes = row_dtypes(layout)
        self.shape = self.key.num_blocks, layout.block_size, layout.num_kv_heads, layout.head_size
        self.value_size = layout.head_size_v
        self._place = tensor.data_ptr(), tensor.shape, tensor.stride()
        self.native = _native(self)
        self.host_forms = {} if self.is_cuda or self.value is None else _host_forms(self)
        self.is_writable = False  # not known yet
        self._geometry: tuple[Any, ...] | None = None
        self._addresses: tuple[int, ...] | None = None
        self._scale_numbers: tuple[float, float] | None = None
        self.library: AttentionOfOthers | None = None

    @property
    def num_slots(self) -> int:
        """Tokens of all blocks."""
        return self.shape[0] * self.shape[1]

    @property
    def addresses(self) -> tuple[int, ...]:
        """Those of K's and V's elements, then of their scales, the cache's own or the given; 0 for a missing one."""
        if self._addresses is None:
            scales = [None if view is None else view.scales for view in self.views]
            if self.scales is not None:
                scales = [self.scales.key, self.scales.value]
            parts = *(None if view is None else view.rows for view in self.views), *scales
            self._addresses = tuple(0 if part is None else part.data_ptr() for part in parts)
        return self._addresses

    @property
    def views(self) -> tuple[KVView, KVView | None]:
        """K and V; V is None where the layout has no value part."""
        return self.key, self.value

    @property
    def geometry(self) -> tuple[Any, ...]:
        """All but addresses: two caches that are equal in it take the same rows, in the same launches."""
        if self._geometry is None:
            tensors = [tensor for view in self.views if view is not None for tensor in (view.rows, view.scales)]
            scales = () if self.scales is None else (self.scales.key, self.scales.value)
            described = [
                None if tensor is None else (tensor.dtype, tensor.shape, tensor.stride())
                for tensor in (*tensors, *scales)
            ]
            self._geometry = self.device, self.shape, self.value_size, self.row_dtypes, *described
        return self._geometry

    @property
    def scale_numbers(self) -> tuple[float, float] | None:
        """The scales of K and V as numbers, read once; None where there are none. They must be one for all heads."""
        if self._scale_numbers is None and self.scales is not None:
            self._scale_numbers = self.scales.key.item(), self.scales.value.item()
        return self._scale_numbers

    def use_library(self, library: AttentionOfOthers | None) -> None:
        """Let a library attend in place of kvpage's kernels from now on.

        Args:
            library: Takes caches of this layout. None: kvpage's kernels attend.
        """
        self.library = library

    def check(self) -> None:
        """Check that the tensor has the memory, shape and strides that it was bound with.

        Raises:
            ValueError: It has others.
        """
        tensor = self.tensor
        if (tensor.data_ptr(), tensor.shape, tensor.stride()) != self._place:
            raise ValueError(
                f"cache must keep the memory, shape and strides that it was bound with, got shape "
                f"{tuple(tensor.shape)} with strides {tensor.stride()} in other memory or another form"
            )

    def check_writable(self) -> None:
        """Check that each element has memory of its own.

        Raises:
            ValueError: Elements share memory, so that a write to one would change another.
        """
        check_writable("cache", self.tensor)
        self.is_writable = True


def bound(cache: torch.Tensor | BoundCache, layout: CacheLayout | None, scales: KVScales | None) -> BoundCache:
    """Return a cache that was bound before, checked for identity, or a tensor bound now."""
    if isinstance(cache, BoundCache):
        if layout is not None or scales is not None:
            raise ValueError("layout and scales must be None for a BoundCache, which has its own")
        cache.check()
        return cache
    return BoundCache(cache, layout, scales)  # type: ignore[arg-type]  # None is refused there


def _host_forms(cache: BoundCache) -> dict[torch.dtype, tuple[int, int]]:
    """The row type and codec of rows in host memory, by their dtype: those as they are, or all that are quantised."""
    if not cache.layout.is_quantized:
        return {cache.tensor.dtype: (BITS, 0)}
    return {dtype: (row_type, cache.native.codec) for dtype, row_type in ROW_TYPES.items()}


def _native(cache: BoundCache) -> NativeCache:
    key_blocks, key_scale = native_blocks(cache.key), NO_SCALE
    value_blocks, value_scale = key_blocks if cache.value is None else native_blocks(cache.value), NO_SCALE
    if cache.scales is not None:
        key_scale, value_scale = _address_and_stride(cache.scales.key), _address_and_stride(cache.scales.value)
    return NativeCache(
        key_blocks,
        value_blocks,
        key_scale,
        key_scale if cache.value is None else value_scale,
        ROW_TYPES.get(cache.tensor.dtype, 0),
        CODECS.get(cache.tensor.dtype, 0),
    )


def _address_and_stride(scale: torch.Tensor) -> tuple[int, int]:
    return scale.data_ptr(), int(len(scale) > 1)

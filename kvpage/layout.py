"""CacheLayout: how one layer's cache tensor is to be read. It goes with the tensors into every operation.

A layout is always named, never guessed from a shape: [2, num_blocks, ...] and [num_blocks, 2, ...] cannot be told
apart when there are two blocks.
"""

import math
from dataclasses import dataclass

import torch

from kvpage.backends import AttentionBackend, get_backend, inverse, stride_order
from kvpage.tensors import check_plain

LAYER_LAYOUTS = ("separate", "packed")


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The layout of each layer's cache: names, sizes and dtype; no tensors.

    layer_layout: `separate` is one tensor a layer. `packed` is one slab for all layers whose outermost dimension is the
        block, (num_blocks, num_layers, the rest in stride order), so that a block of all layers is one run of memory.
    head_size: the larger of K's and V's; a smaller one leaves the rest of each row unused.
    """

    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    backend: str = "flash"
    kv_layout: str = "NHD"
    layer_layout: str = "separate"

    def __post_init__(self) -> None:
        for name in ("block_size", "num_kv_heads", "head_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if not isinstance(self.dtype, torch.dtype):
            raise ValueError(f"dtype must be a torch.dtype, got {self.dtype!r}")
        if self.layer_layout not in LAYER_LAYOUTS:
            raise ValueError(f"layer_layout must be one of {', '.join(LAYER_LAYOUTS)}, got {self.layer_layout!r}")
        stride_order(get_backend(self.backend), self.kv_layout)

    @property
    def backend_class(self) -> type[AttentionBackend]:
        return get_backend(self.backend)

    @property
    def block_dim(self) -> int:
        """The dimension of the generic shape that counts blocks."""
        return self.backend_class.block_dim

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in one layer, K and V together."""
        return math.prod(self.shape(1)) * self.dtype.itemsize

    def shape(self, num_blocks: int) -> tuple[int, ...]:
        """The generic shape of one layer's cache."""
        return tuple(
            self.backend_class.get_kv_cache_shape(num_blocks, self.block_size, self.num_kv_heads, self.head_size)
        )

    def num_blocks(self, cache: torch.Tensor) -> int:
        """The number of blocks of one layer's cache. ValueError if `cache` is not of this layout."""
        self.validate(cache)
        return cache.shape[self.block_dim]

    def validate(self, cache: torch.Tensor, name: str = "cache") -> None:
        """ValueError unless `cache` has this layout's dtype and generic shape, with its last dimension contiguous, and
        is no view that torch negates or conjugates. TypeError unless it is a tensor."""
        check_plain(name, cache)
        if cache.dtype != self.dtype:
            raise ValueError(f"{name}.dtype must be {self.dtype}, got {cache.dtype}")
        expected = self.shape(cache.shape[self.block_dim] if cache.dim() > self.block_dim else 0)
        if tuple(cache.shape) != expected:
            raise ValueError(f"{name}.shape must be {expected}, got {tuple(cache.shape)}")
        if cache.stride(-1) != 1 and cache.shape[-1] > 1:
            raise ValueError(f"{name} must be contiguous in its last dimension, got stride {cache.stride(-1)}")

    def split_kv(self, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the keys and values: strided, each [num_blocks, block_size, num_kv_heads, head_size]."""
        backend = self.backend_class
        if not hasattr(backend, "split_kv"):
            raise ValueError(f"backend {self.backend!r} must define split_kv to be written or gathered")
        return backend.split_kv(cache)

    def allocate(
        self, num_blocks: int, num_layers: int, device: torch.device, pin_memory: bool = False
    ) -> list[torch.Tensor]:
        """Zeroed caches of `num_layers` layers, in the generic shape over memory in stride order."""
        order = stride_order(self.backend_class, self.kv_layout)
        shape = self.shape(num_blocks)

        def zeros(size: list[int]) -> torch.Tensor:
            return torch.zeros(size, dtype=self.dtype, device=device, pin_memory=pin_memory)

        if self.layer_layout == "separate":
            lying = [shape[dim] for dim in order]
            return [zeros(lying).permute(inverse(order)) for _ in range(num_layers)]
        order = (self.block_dim, *(dim for dim in order if dim != self.block_dim))
        first, *rest = (shape[dim] for dim in order)
        slab = zeros([first, num_layers, *rest])
        return [slab[:, layer].permute(inverse(order)) for layer in range(num_layers)]


def check_layout(layout: CacheLayout) -> None:
    """TypeError unless it is a CacheLayout."""
    if not isinstance(layout, CacheLayout):
        raise TypeError(f"layout must be a CacheLayout, got {type(layout).__name__}")

"""CacheLayout: the way to read one layer's cache tensor. It goes with the tensors into every operation.

A layout is always named, never guessed from a shape: [2, num_blocks, ...] and [num_blocks, 2, ...] cannot be told
apart when there are two blocks.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kvpage.checks.tensors import check_plain
from kvpage.layout import host_memory, pinned_memory
from kvpage.layout.backends import AttentionBackend, get_backend, inverse, stride_order
from kvpage.layout.kv_scales import FP8_DTYPES
from kvpage.layout.kv_view import KVView

LAYER_LAYOUTS = ("separate", "packed")
SCALE_BYTES = 4
_DTYPE_NAMES = {
    dtype: str(dtype).removeprefix("torch.") for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)
}
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The layout of each layer's cache: names, sizes and dtype, without tensors.

    Args:
        block_size: Tokens of a block.
        num_kv_heads: KV heads on one rank.
        head_size: Elements of a head of K. Smaller heads leave the rest of each row unused.
        dtype: The dtype of stored elements. 8-bit floats are quantised with scales that the operations take (KVScales).
            int8 is quantised with one fp32 scale for each token and head, kept in the block itself.
        backend: The registered name of an attention backend, which defines the generic shape: see
            kvpage.layout.backends.
        kv_layout: The order of tokens and heads in memory, "NHD" or "HND".
        layer_layout: `separate` is one tensor a layer. `packed` is one slab for all layers, (num_blocks, num_layers,
            the rest in stride order). Then a block of all layers is one run of memory.
        value_size: Elements of a head of V; None for as many as K's. Only the backend "joint" takes another size. There
            0 is for a layer without V.

    Raises:
        ValueError: A size is not positive, a name is unknown, or the backend does not take num_kv_heads heads, or
            another size of V.
    """

    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    backend: str = "flash"
    kv_layout: str = "NHD"
    layer_layout: str = "separate"
    value_size: int | None = None

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
        most = getattr(self.backend_class, "max_kv_heads", self.num_kv_heads)
        if self.num_kv_heads > most:
            raise ValueError(f"num_kv_heads must be at most {most} for {self.backend!r}, got {self.num_kv_heads}")
        self._check_value_size()

    def _check_value_size(self) -> None:
        size = self.value_size
        if size == self.head_size:
            object.__setattr__(self, "value_size", None)  # one form for equal layouts
            return
        if size is None:
            return
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise ValueError(f"value_size must be an integer of at least 0, or None, got {size!r}")
        if not self._joins_values:
            raise ValueError(f"value_size must be None or {self.head_size} for {self.backend!r}, got {size}")

    @property
    def head_size_v(self) -> int:
        """Elements of a head of V."""
        return self.head_size if self.value_size is None else self.value_size

    @property
    def _joins_values(self) -> bool:
        return getattr(self.backend_class, "joins_values", False)

    @property
    def spec(self) -> str:
        """The layout as a word, such as "flash:NHD:separate:16:8:128:bfloat16". The operators of torch take it.

        The size of V follows where it is another one: "joint:NHD:separate:16:8:192+128:bfloat16".
        """
        sizes = f"{self.block_size}:{self.num_kv_heads}:{self.head_size}"
        sizes += "" if self.value_size is None else f"+{self.value_size}"
        return f"{self.backend}:{self.kv_layout}:{self.layer_layout}:{sizes}:{_DTYPE_NAMES[self.dtype]}"

    @classmethod
    def from_spec(cls, spec: str) -> "CacheLayout":
        """Return the layout with this `spec`.

        Args:
            spec: The word that `CacheLayout.spec` gives.

        Raises:
            TypeError: `spec` is no str.
            ValueError: No layout has this spec.
        """
        if not isinstance(spec, str):
            raise TypeError(f"spec must be a str, got {type(spec).__name__}")
        return _from_spec(spec)

    @property
    def is_quantized(self) -> bool:
        """Whether stored elements differ from the caller's elements."""
        return self.has_token_scales or self.dtype in FP8_DTYPES

    @property
    def has_token_scales(self) -> bool:
        """Whether each token's head has a scale of its own, in the block."""
        return self.dtype == torch.int8

    @property
    def padded_head_size(self) -> int:
        """Elements from the start of a head of K to the next data, without a scale."""
        return self._padded(self.head_size)

    def _padded(self, head_size: int) -> int:
        pad = getattr(self.backend_class, "padded_head_size", None)
        size = head_size if pad is None else pad(head_size, self.dtype.itemsize)
        return -(-size // SCALE_BYTES) * SCALE_BYTES if self.has_token_scales else size

    def _row_size(self, head_size: int) -> int:
        """Return the elements of a row of K or V: the padded head, and its scale if there is one."""
        return self._padded(head_size) + (SCALE_BYTES if self.has_token_scales else 0)

    @property
    def row_sizes(self) -> tuple[int, ...]:
        """Elements of a head's row of K and of V, with padding and scales; of K alone where there is no V."""
        sizes = (self.head_size,) if self.value_size == 0 else (self.head_size, self.head_size_v)
        return tuple(map(self._row_size, sizes))

    def part(self, index: int) -> "CacheLayout":
        """Return the layout of K's rows alone, or of V's, where both are in one row: `row_sizes` gives their columns.

        Args:
            index: 0 for K, 1 for V.

        Raises:
            ValueError: K and V are not in one row.
        """
        return replace(self, head_size=(self.head_size, self.head_size_v)[index], value_size=0)

    @property
    def backend_class(self) -> type[AttentionBackend]:
        """The attention backend with the name `backend`."""
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
        """Return the generic shape of one layer's cache.

        Args:
            num_blocks: Number of blocks.
        """
        sizes = self.row_sizes
        row_size = sum(sizes) if self._joins_values else sizes[0]
        return tuple(self.backend_class.get_kv_cache_shape(num_blocks, self.block_size, self.num_kv_heads, row_size))

    def num_blocks(self, cache: torch.Tensor) -> int:
        """Return the number of blocks of one layer's cache.

        Args:
            cache: The layer's cache.

        Raises:
            TypeError: `cache` is no tensor.
            ValueError: `cache` is not of this layout.
        """
        self.validate(cache)
        return cache.shape[self.block_dim]

    def validate(self, cache: torch.Tensor, name: str = "cache") -> None:
        """Check that `cache` has this layout's dtype and generic shape.

        Args:
            cache: The layer's cache.
            name: Name of the cache in error messages.

        Raises:
            TypeError: `cache` is no plain tensor.
            ValueError: The dtype or the shape is another one, or the last dimension is not contiguous. A view that
                torch negates or conjugates is refused, too.
        """
        check_plain(name, cache)
        if cache.dtype != self.dtype:
            raise ValueError(f"{name}.dtype must be {self.dtype}, got {cache.dtype}")
        expected = self.shape(cache.shape[self.block_dim] if cache.dim() > self.block_dim else 0)
        if tuple(cache.shape) != expected:
            raise ValueError(f"{name}.shape must be {expected}, got {tuple(cache.shape)}")
        if cache.stride(-1) != 1 and cache.shape[-1] > 1:
            raise ValueError(f"{name} must be contiguous in its last dimension, got stride {cache.stride(-1)}")

    def views(self, cache: torch.Tensor) -> tuple[KVView, KVView | None]:
        """Return views of K and V of one layer's cache.

        Args:
            cache: The layer's cache. It is not checked.

        Returns:
            K and V. V is None where the backend has no value part (MLA).

        Raises:
            ValueError: The backend defines neither `split_kv` nor `kv_views`.
        """
        backend = self.backend_class
        if self._joins_values:
            key, *values = torch.split(cache, list(self.row_sizes), dim=-1)
            return self._view(key, self.head_size), self._view(values[0], self.head_size_v) if values else None
        if hasattr(backend, "kv_views"):
            sizes = self.block_size, self.num_kv_heads, self.padded_head_size
            views: tuple[KVView, KVView | None] = backend.kv_views(cache, *sizes)
            return views
        if not hasattr(backend, "split_kv"):
            raise ValueError(f"backend {self.backend!r} must define split_kv or kv_views to be written or gathered")
        key, value = backend.split_kv(cache)
        return self._view(key, self.head_size), None if value is None else self._view(value, self.head_size)

    def _view(self, rows: torch.Tensor, head_size: int) -> KVView:
        size = self._padded(head_size)
        scales = rows[..., size:].view(torch.float32).squeeze(3) if self.has_token_scales else None
        return KVView(rows[..., :size].unsqueeze(3), scales)

    def allocate(
        self, num_blocks: int, num_layers: int, device: torch.device, pin_memory: bool = False
    ) -> list[torch.Tensor]:
        """Allocate the zeroed caches of some layers. The caller owns them.

        Args:
            num_blocks: Blocks of each cache.
            num_layers: Number of layers.
            device: The caches' device.
            pin_memory: Whether to pin host memory, for copies to and from CUDA. It is given whole, in its true size.

        Returns:
            One tensor a layer, in the generic shape over memory in stride order. With layer_layout "packed" they share
            one slab.

        Raises:
            OSError: The system has less memory, or cannot pin it.
        """
        return allocate_layers([self] * num_layers, num_blocks, device, pin_memory)

    def sizes_in_memory(self, num_blocks: int) -> list[int]:
        """Return the sizes of the cache's dimensions, the outermost in memory first.

        Args:
            num_blocks: Number of blocks.
        """
        shape = self.shape(num_blocks)
        return [shape[dim] for dim in self._order]

    @property
    def _order(self) -> tuple[int, ...]:
        """The generic dimensions, the outermost in memory first; packed layers begin with the blocks."""
        order = stride_order(self.backend_class, self.kv_layout)
        if self.layer_layout == "separate":
            return order
        return self.block_dim, *(dim for dim in order if dim != self.block_dim)

    def of_memory(self, memory: torch.Tensor) -> torch.Tensor:
        """Return a view, in the generic shape, of a tensor of `sizes_in_memory`.

        Args:
            memory: The tensor.
        """
        return memory.permute(inverse(self._order))


def allocate_layers(
    layouts: Sequence[CacheLayout], num_blocks: int, device: torch.device, pin_memory: bool = False
) -> list[torch.Tensor]:
    """Allocate the zeroed caches of layers with layouts of their own. The caller owns them.

    Args:
        layouts: Of each layer, all of one dtype and layer_layout.
        num_blocks: Blocks of each cache.
        device: The caches' device.
        pin_memory: As in `CacheLayout.allocate`.

    Returns:
        One tensor a layer, as from `CacheLayout.allocate`.

    Raises:
        OSError: The system has less memory, or cannot pin it.
    """
    if not layouts:
        return []
    sizes, dtype = [layout.sizes_in_memory(num_blocks) for layout in layouts], layouts[0].dtype
    if layouts[0].layer_layout == "separate":
        memories = _zeros(sizes, dtype, device, pin_memory)
    else:
        counts = [math.prod(rest) for _, *rest in sizes]
        (slab,) = _zeros([[num_blocks, sum(counts)]], dtype, device, pin_memory)
        parts = zip(torch.split(slab, counts, dim=1), sizes, strict=True)
        memories = [torch.unflatten(part, 1, rest) for part, (_, *rest) in parts]
    return [layout.of_memory(memory) for layout, memory in zip(layouts, memories, strict=True)]


def _zeros(sizes: list[list[int]], dtype: torch.dtype, device: torch.device, pin_memory: bool) -> list[torch.Tensor]:
    """Return tensors of these sizes. Pinned ones are registered whole: no copy crosses a border of pieces."""
    if pin_memory:
        return pinned_memory.pinned_zeros(sizes, dtype, "the host tier")
    if device.type == "cpu":
        return [host_memory.zeros(size, dtype) for size in sizes]
    return [torch.zeros(size, dtype=dtype, device=device) for size in sizes]


def check_layout(layout: CacheLayout) -> None:
    """Raise TypeError unless `layout` is a CacheLayout, or has the methods of one."""
    if not hasattr(layout, "views"):
        raise TypeError(f"layout must be a CacheLayout, got {type(layout).__name__}")


@functools.lru_cache(maxsize=1024)
def _from_spec(spec: str) -> CacheLayout:
    parts = spec.rsplit(":", 6)  # a backend's own name may hold colons
    numbers = [] if len(parts) != 7 else [*parts[3:5], *parts[5].split("+")]
    if len(numbers) not in (3, 4) or parts[6] not in _DTYPES or not all(size.isdecimal() for size in numbers):
        raise ValueError(
            f"spec must be backend:kv_layout:layer_layout:block_size:num_kv_heads:head_size:dtype, got {spec!r}"
        )
    backend, kv_layout, layer_layout, *_, dtype = parts
    block_size, num_kv_heads, head_size, *of_values = map(int, numbers)
    value_size = of_values[0] if of_values else None
    return CacheLayout(
        block_size, num_kv_heads, head_size, _DTYPES[dtype], backend, kv_layout, layer_layout, value_size
    )

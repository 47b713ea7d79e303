"""Attention backends: the shape of one layer's cache, and the order of its dimensions in memory.

A backend is a class of static facts. It gives the *generic* shape, which attention indexes, and the dimension that
counts blocks. For each `kv_layout` it gives the *stride order*: the generic dimensions from the outermost in memory to
the innermost. For flash with HND

    generic shape   (2, num_blocks, block_size, heads, head_size)        dimension 0  1  2  3  4
    stride order     0  1           3      2           4
    in memory       [2, num_blocks, heads, block_size, head_size]

so the engine allocates `[shape[d] for d in order]` and permutes back with the inverse of the order.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

from kvpage.layout.kv_view import KVView

__all__ = [
    "KV_LAYOUTS",
    "AttentionBackend",
    "FlashBackend",
    "FlashInferBackend",
    "JointBackend",
    "MlaBackend",
    "PagedBackend",
    "get_backend",
    "register_backend",
]

KV_LAYOUTS = ("NHD", "HND")
RUN_BYTES = 16  # of K in the backend "paged"


@runtime_checkable
class AttentionBackend(Protocol):
    """A backend's facts. These are optional:

    `kv_layouts`: the layouts it knows (default: NHD only). `max_kv_heads`: default any number.
    `get_kv_cache_stride_order(kv_layout) -> Sequence[int]`: default is the order of the generic shape.
    `split_kv(cache) -> (key, value)`: strided views [num_blocks, block_size, num_kv_heads, head_size]; value None where
        there is no value part. Caches without it and without `kv_views` can be swapped and copied, but the operations
        on tokens cannot write or read them.
    `kv_views(cache, block_size, num_kv_heads, head_size) -> (key, value)`: KVViews, for backends whose heads are not
        one run of memory; called instead of split_kv. head_size is the padded one, without scales.
    `padded_head_size(head_size, element_bytes)`: default head_size. Where each token and head has a scale, 4 bytes are
        added for it, and get_kv_cache_shape is asked for the sum.
    `uneven`: the name of the backend of layers whose V has another size than K; default: this one, with rows of the
        larger size for both.
    `joins_values`: whether K and V of a head are one row, so that V may have a size of its own, or be missing.
        get_kv_cache_shape is asked for the size of the whole row. It needs no split_kv.
    `swap_blocks(src, dst, block_mapping)` and `copy_blocks(caches, block_mapping)`: called instead of kvpage's own,
        with one layer's tensors, or with the tensors of all layers; `block_mapping` is int64 [num_pairs, 2] on the CPU.
    """

    block_dim: int

    @staticmethod
    def get_kv_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        """Return the generic shape of one layer's cache.

        Args:
            num_blocks: Blocks of the cache.
            block_size: Tokens of a block.
            num_kv_heads: Heads of K and V.
            head_size: Elements of a head, padded, with room for its scale if there is one.

        Returns:
            The size of each dimension.
        """
        ...


class FlashBackend:
    """FlashAttention: keys of all blocks, then values of all blocks."""

    block_dim = 1
    kv_layouts = KV_LAYOUTS
    uneven = "joint"

    @staticmethod
    def get_kv_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        """Return (2, `num_blocks`, `block_size`, `num_kv_heads`, `head_size`)."""
        return (2, num_blocks, block_size, num_kv_heads, head_size)

    @staticmethod
    def get_kv_cache_stride_order(kv_layout: str) -> tuple[int, ...]:
        """Return the dimensions of the generic shape for `kv_layout`, the outermost in memory first."""
        return {"NHD": (0, 1, 2, 3, 4), "HND": (0, 1, 3, 2, 4)}[kv_layout]

    @staticmethod
    def split_kv(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the views of K and V of `cache`: [num_blocks, block_size, num_kv_heads, head_size] each."""
        return cache[0], cache[1]


class FlashInferBackend:
    """FlashInfer: keys and values of a block side by side."""

    block_dim = 0
    kv_layouts = KV_LAYOUTS
    uneven = "joint"

    @staticmethod
    def get_kv_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        """Return (`num_blocks`, 2, `block_size`, `num_kv_heads`, `head_size`)."""
        return (num_blocks, 2, block_size, num_kv_heads, head_size)

    @staticmethod
    def get_kv_cache_stride_order(kv_layout: str) -> tuple[int, ...]:
        """Return the dimensions of the generic shape for `kv_layout`, the outermost in memory first."""
        return {"NHD": (0, 1, 2, 3, 4), "HND": (0, 1, 3, 2, 4)}[kv_layout]

    @staticmethod
    def split_kv(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the views of K and V of `cache`: [num_blocks, block_size, num_kv_heads, head_size] each."""
        return cache[:, 0], cache[:, 1]


class PagedBackend:
    """The first paged-attention kernels' cache: within a block, K in runs of 16 bytes, V transposed.

        K of a block   [num_kv_heads, head_size / x, block_size, x]      x = elements in 16 bytes
        V of a block   [num_kv_heads, head_size, block_size]

    The generic shape is flat within a block. Heads are padded to a multiple of x. Scales follow the elements of their
    block, [num_kv_heads, block_size].
    """

    block_dim = 1

    @staticmethod
    def get_kv_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        """Return (2, `num_blocks`, `block_size` * `num_kv_heads` * `head_size`)."""
        return (2, num_blocks, block_size * num_kv_heads * head_size)

    @staticmethod
    def padded_head_size(head_size: int, element_bytes: int) -> int:
        """Return `head_size` rounded up to whole runs of 16 bytes, in elements of `element_bytes`."""
        run_size = RUN_BYTES // element_bytes
        return -(-head_size // run_size) * run_size

    @staticmethod
    def kv_views(
        cache: torch.Tensor, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[KVView, KVView | None]:
        """Return the views of K and V of one layer, with scales where the cache has room for them.

        Args:
            cache: Of the generic shape.
            block_size: Tokens of a block.
            num_kv_heads: Heads of K and V.
            head_size: Elements of a head, padded, without scales.

        Returns:
            The view of K, and that of V.
        """
        run_size, num_elements = RUN_BYTES // cache.element_size(), block_size * num_kv_heads * head_size
        key, value = (cache[part, :, :num_elements] for part in (0, 1))
        runs = num_kv_heads, head_size // run_size, block_size, run_size
        key = torch.unflatten(key, 1, runs).permute(0, 3, 1, 2, 4)
        value = torch.unflatten(value, 1, (num_kv_heads, head_size, block_size)).permute(0, 3, 1, 2).unsqueeze(4)
        if cache.shape[2] == num_elements:
            return KVView(key), KVView(value)
        scales = [cache[part, :, num_elements:].view(torch.float32) for part in (0, 1)]
        by_token = [torch.unflatten(part, 1, (num_kv_heads, block_size)).transpose(1, 2) for part in scales]
        return KVView(key, by_token[0]), KVView(value, by_token[1])


class JointBackend:
    """K and V of a token's head in one row, K first: V may have a size of its own."""

    block_dim = 0
    kv_layouts = KV_LAYOUTS
    joins_values = True

    @staticmethod
    def get_kv_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        """Return (`num_blocks`, `block_size`, `num_kv_heads`, `head_size`), the last of K and V together."""
        return (num_blocks, block_size, num_kv_heads, head_size)

    @staticmethod
    def get_kv_cache_stride_order(kv_layout: str) -> tuple[int, ...]:
        """Return the dimensions of the generic shape for `kv_layout`, the outermost in memory first."""
        return {"NHD": (0, 1, 2, 3), "HND": (0, 2, 1, 3)}[kv_layout]


class MlaBackend:
    """Multi-head latent attention: one latent with its rotary part a token, for all heads, and no value part."""

    block_dim = 0
    max_kv_heads = 1

    @staticmethod
    def get_kv_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        """Return (`num_blocks`, `block_size`, `head_size`); `num_kv_heads` is 1."""
        return (num_blocks, block_size, head_size)

    @staticmethod
    def split_kv(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the latents of `cache` as [num_blocks, block_size, 1, head_size], and None: there is no V."""
        return cache.unsqueeze(2), None


_backends: dict[str, type[AttentionBackend]] = {
    "flash": FlashBackend,
    "flashinfer": FlashInferBackend,
    "joint": JointBackend,
    "mla": MlaBackend,
    "paged": PagedBackend,
}


def register_backend(name: str, backend: type[AttentionBackend]) -> None:
    """Make a backend known as `CacheConfig(backend=name)`.

    Args:
        name: A new name.
        backend: A class with `get_kv_cache_shape` and `block_dim`.

    Raises:
        ValueError: The name is taken, the class lacks a name that AttentionBackend asks for, or its `block_dim` does
            not count blocks.
    """
    if name in _backends:
        raise ValueError(f"backend names must be unique, {name!r} is taken by {_backends[name].__name__}")
    for attribute in ("block_dim", "get_kv_cache_shape"):
        if not hasattr(backend, attribute):
            raise ValueError(f"backend {name!r} must define {attribute}, {backend.__name__} does not")
    shape = tuple(backend.get_kv_cache_shape(3, 1, 1, 1))
    if not 0 <= backend.block_dim < len(shape) or shape[backend.block_dim] != 3:
        raise ValueError(f"block_dim must be the dimension that counts blocks, got {backend.block_dim} for {shape}")
    _backends[name] = backend


def get_backend(name: str) -> type[AttentionBackend]:
    """Return the backend of this name.

    Args:
        name: "flash", "flashinfer", "joint", "mla", "paged", or a registered one.

    Returns:
        The class.

    Raises:
        ValueError: No backend has this name. The message lists the known names.
    """
    if name not in _backends:
        raise ValueError(f"backend must be one of {', '.join(sorted(_backends))}, got {name!r}")
    return _backends[name]


def stride_order(backend: type[AttentionBackend], kv_layout: str) -> tuple[int, ...]:
    """Return the backend's generic dimensions, outermost in memory first. ValueError if they are no permutation."""
    if kv_layout not in getattr(backend, "kv_layouts", KV_LAYOUTS[:1]):
        raise ValueError(f"kv_layout must be one that {backend.__name__} knows, got {kv_layout!r}")
    num_dims = len(backend.get_kv_cache_shape(1, 1, 1, 1))
    if not hasattr(backend, "get_kv_cache_stride_order"):
        return tuple(range(num_dims))
    order = tuple(backend.get_kv_cache_stride_order(kv_layout))
    if sorted(order) != list(range(num_dims)):
        raise ValueError(f"the stride order of {backend.__name__} must permute {num_dims} dimensions, got {order}")
    return order


def inverse(order: Sequence[int]) -> tuple[int, ...]:
    """Return the permutation that undoes `order`. It differs from `order` unless that is its own inverse."""
    return tuple(order.index(dim) for dim in range(len(order)))

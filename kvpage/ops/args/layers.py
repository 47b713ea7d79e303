"""Layers: the caches of some layers, checked once, and told by their places from then on.

    caches, layout ─► places: address, dtype, shape, strides, device of each ─► known: nothing is checked again
                                                                            └─► checked, and kept as known

Chunks of one engine are moved between the same caches again and again. To check each layer takes longer than a launch.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

import kvpage._C as _C
from kvpage.checks.tensors import check_plain, check_writable
from kvpage.layout.cache_layout import CacheLayout, check_layout
from kvpage.ops.args.tokens import check_cache, native_blocks

ALIGNMENT = 16  # bytes: caches are launched together where their addresses leave the same remainder


class Layers(NamedTuple):
    """Facts about caches that were checked: layers are the caches' numbers here.

    device: Of all caches.
    num_blocks: Of each cache.
    num_parts: 2, or 1 where there is no V.
    alike: Runs [first, last) of layers that have the same strides, and addresses as aligned: almost always one run.
    blocks: K's and V's of each layer; V's is None where there is no V.
    """

    device: torch.device
    num_blocks: int
    num_parts: int
    alike: tuple[tuple[int, int], ...]
    blocks: tuple[tuple[_C.KVPart, _C.KVPart | None], ...]


class KnownLayers:
    """At most `capacity` sets of caches that were checked; when full, it starts anew. It keeps no tensor alive."""

    def __init__(self, capacity: int = 256) -> None:
        self._capacity = capacity
        self._known: dict[Any, Layers] = {}

    def check(self, caches: Sequence[torch.Tensor], layout: CacheLayout, is_written: bool) -> Layers:
        """Return the facts of some caches.

        Args:
            caches: One a layer.
            layout: Of all.
            is_written: Whether each element must have memory of its own.

        Raises:
            TypeError: A cache is no tensor, or `layout` no layout.
            ValueError: There is no cache, one is not of the layout, or they differ in device or in number of blocks.
        """
        check_layout(layout)
        places = _places(caches)
        known = None if places is None else self._known.get((layout, is_written, places))
        if known is not None:
            return known
        layers = _checked(caches, layout, is_written)
        if places is not None:
            if len(self._known) >= self._capacity:
                self._known.clear()
            self._known[layout, is_written, places] = layers
        return layers


def _places(caches: Sequence[torch.Tensor]) -> tuple[Any, ...] | None:
    """Return all that is checked; None for rare tensors."""
    if not all(map(_is_plain, caches)):
        return None
    return tuple([(cache.data_ptr(), cache.dtype, cache.get_device(), cache.shape, cache.stride()) for cache in caches])


def _is_plain(cache: torch.Tensor) -> bool:
    is_strided = type(cache) is torch.Tensor and cache.layout is torch.strided and not cache.is_nested
    return is_strided and not cache.is_neg()


def _checked(caches: Sequence[torch.Tensor], layout: CacheLayout, is_written: bool) -> Layers:
    if not caches:
        raise ValueError("caches must be at least one layer's, got none")
    for layer, cache in enumerate(caches):
        name = f"caches[{layer}]"
        (check_writable if is_written else check_plain)(name, cache)
        check_cache(cache, layout)
    places = {(cache.device, layout.num_blocks(cache)) for cache in caches}
    if len(places) > 1:
        raise ValueError(f"caches must be on one device with as many blocks in each, got {sorted(map(str, places))}")
    kinds = [(cache.stride(), cache.data_ptr() % ALIGNMENT) for cache in caches]
    views = [layout.views(cache) for cache in caches]
    num_parts = sum(view is not None for view in views[0])
    blocks = tuple((native_blocks(key), None if value is None else native_blocks(value)) for key, value in views)
    return Layers(*places.pop(), num_parts, tuple(runs_alike(kinds)), blocks)


def runs_alike(kinds: Sequence[Any]) -> list[tuple[int, int]]:
    """Return the runs [first, last) of equal kinds.

    Args:
        kinds: Of each layer.
    """
    firsts = [i for i, kind in enumerate(kinds) if i == 0 or kind != kinds[i - 1]]
    return list(zip(firsts, [*firsts[1:], len(kinds)], strict=True))

"""ReshapeMemo: calls of reshape_and_cache on a GPU that were checked and launched: the next like them is only launched.

A model calls it once a layer and step, each time with the same shapes, strides and dtypes; to look at these again would
take longer than the kernel. What differs from call to call is memory: its addresses are taken anew each time.
"""

from typing import Any, NamedTuple, Protocol

import torch

from kvpage.layout.cache_layout import CacheLayout
from kvpage.layout.kv_scales import KVScales
from kvpage.layout.kv_view import KVView

ALIGNMENT = 16  # bytes: kernels are compiled anew for addresses that are no multiple of it


class Launched(Protocol):
    """A launch that can be made again; see kvpage.kernels.reshape."""

    def again(self, addresses: tuple[int, ...]) -> None: ...


class Call(NamedTuple):
    """The arguments of reshape_and_cache."""

    key: torch.Tensor
    value: torch.Tensor | None
    cache: torch.Tensor
    slots: torch.Tensor
    layout: CacheLayout
    scales: KVScales | None

    def kind(self) -> tuple[Any, ...]:
        """All of the call that is checked, and that its kernel was compiled for, but for the alignment of addresses."""
        key, value, cache, slots, layout, scales = self
        return (
            layout,
            (key.dtype, key.device, key.shape, key.stride()),
            None if value is None else (value.dtype, value.device, value.shape, value.stride()),
            (cache.dtype, cache.device, cache.shape, cache.stride()),
            (slots.dtype, slots.device, slots.shape, slots.stride()),
            scales and (scales.key.device, scales.key.shape, scales.value.device, scales.value.shape),
        )


class _Known(NamedTuple):
    """offsets: bytes from the cache's address to K's and V's elements and scales; None for what is not in the cache."""

    launched: Launched
    offsets: tuple[int | None, ...]
    error_address: int


class ReshapeMemo:
    """At most `capacity` kinds of calls; when it is full, it starts anew. Keeps no tensor alive."""

    def __init__(self, capacity: int = 4096) -> None:
        self._capacity = capacity
        self._known: dict[tuple[Any, ...], _Known] = {}

    def remember(
        self, call: Call, launched: Launched, views: tuple[KVView, KVView | None], error: torch.Tensor
    ) -> None:
        """`call` was checked and launched, with these views of its cache and this word for errors, which must stay."""
        parts = [None if view is None else view.rows for view in views]
        parts += [None if view is None else view.scales for view in views]
        base = call.cache.data_ptr()
        known = _Known(
            launched, tuple(None if part is None else part.data_ptr() - base for part in parts), error.data_ptr()
        )
        if not _are_aligned(_addresses(call, known)):
            return
        if len(self._known) >= self._capacity:
            self._known.clear()
        self._known[call.kind()] = known

    def repeat(self, call: Call) -> bool:
        """Launches `call`, if one of its kind is known; else nothing has happened, and it has to be checked."""
        known = self._known.get(call.kind())
        if known is None:
            return False
        addresses = _addresses(call, known)
        if not _are_aligned(addresses):
            return False
        known.launched.again(addresses)
        return True


def _addresses(call: Call, known: _Known) -> tuple[int, ...]:
    """Of key, value, K's and V's elements, K's and V's scales, slots, and error word; 0 for what there is not."""
    base = call.cache.data_ptr()
    key_part, value_part, key_scale, value_scale = (0 if part is None else base + part for part in known.offsets)
    if call.scales is not None:
        key_scale, value_scale = call.scales.key.data_ptr(), call.scales.value.data_ptr()
    return (
        call.key.data_ptr(),
        0 if call.value is None else call.value.data_ptr(),
        key_part,
        value_part,
        key_scale,
        value_scale,
        call.slots.data_ptr(),
        known.error_address,
    )


def _are_aligned(addresses: tuple[int, ...]) -> bool:
    """Whether key, value, and K's and V's elements are."""
    key, value, key_part, value_part, *_ = addresses
    return (key | value | key_part | value_part) % ALIGNMENT == 0

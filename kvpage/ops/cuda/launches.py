"""Launches: earlier launches of a kernel that writes rows, so that the next one like them needs no look-up by Triton.

Triton derives from all arguments the machine code to run. This takes longer than writing the rows of a step, and a
model asks for the same once a layer and step. All arguments are checked before; only addresses are read anew here.
"""

from typing import Any, NamedTuple, Protocol

import torch

from kvpage.ops.args.bound_cache import BoundCache

ALIGNMENT = 16  # bytes: kernels are compiled anew for addresses that are no multiple of it


class Launched(Protocol):
    """A launch that can be made again; see kvpage.kernels.reshape."""

    def again(self, addresses: tuple[int, ...]) -> None:
        """Launch on other memory, on the current stream; 0 for memory that is not there."""


class Rows(NamedTuple):
    """Rows to be written into slots of a cache, checked."""

    key: torch.Tensor
    value: torch.Tensor | None
    cache: BoundCache
    slots: torch.Tensor

    def kind(self) -> tuple[Any, ...]:
        """Return all that a kernel is compiled for, but for the alignment of addresses."""
        key, value, cache, _ = self
        return (
            cache.geometry,
            (key.dtype, key.shape, key.stride()),
            None if value is None else (value.dtype, value.shape, value.stride()),
        )

    def addresses(self, error: torch.Tensor) -> tuple[int, ...]:
        """Return those of key, value, K's and V's elements and scales, slots, and error word; 0 for a missing one."""
        cache = self.cache
        views, scales = cache.views, cache.scales
        given = [None if view is None else view.scales for view in views]
        if scales is not None:
            given = [scales.key, scales.value]
        parts = [None if view is None else view.rows for view in views]
        tensors = self.key, self.value, *parts, *given, self.slots, error
        return tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors)


class Launches:
    """At most `capacity` kinds of launches; when it is full, it starts anew. It keeps no tensor alive."""

    def __init__(self, capacity: int = 4096) -> None:
        self._capacity = capacity
        self._known: dict[tuple[Any, ...], Launched] = {}

    def keep(self, rows: Rows, launched: Launched) -> None:
        """Keep a launch of these rows, unless they are in memory that is not aligned."""
        if not _are_aligned(rows.addresses(rows.slots)):
            return
        if len(self._known) >= self._capacity:
            self._known.clear()
        self._known[rows.kind()] = launched

    def repeat(self, rows: Rows, error: torch.Tensor) -> bool:
        """Launch for these rows and return True, if a launch of their kind is known."""
        launched = self._known.get(rows.kind())
        if launched is None:
            return False
        addresses = rows.addresses(error)
        if not _are_aligned(addresses):
            return False
        launched.again(addresses)
        return True


def _are_aligned(addresses: tuple[int, ...]) -> bool:
    """Return whether the addresses of key, value, and K's and V's elements are aligned."""
    key, value, key_part, value_part, *_ = addresses
    return (key | value | key_part | value_part) % ALIGNMENT == 0

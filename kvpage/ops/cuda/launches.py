"""Launches: earlier launches of a kernel that writes rows, so that the next one like them is only made, not derived.

Triton derives from all arguments the machine code to run, and kvpage checks them. Both take longer than writing the
rows of a step, and a model asks for the same once a layer and step. What was checked once is checked no more: a known
kind of rows differs in nothing but its number of rows and their addresses.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from kvpage.ops.args.bound_cache import BoundCache

Kind = tuple[Any, ...]
CAPACITY = 4096


class Launched(Protocol):
    """A launch that can be made again; see kvpage.kernels.reshape."""

    def again(self, addresses: Sequence[int], num_tokens: int, num_slots: int) -> bool:
        """Launch on other memory, on the current stream; 0 for memory that is not there. False: it was not done."""


class Launches:
    """At most `capacity` kinds of launches; when it is full, it starts anew. It keeps no tensor alive."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._known: dict[Kind, Launched] = {}

    def keep(
        self,
        key: torch.Tensor,
        value: torch.Tensor | None,
        cache: BoundCache,
        slots: torch.Tensor,
        launched: Launched,
    ) -> None:
        """Keep the launch of rows that were checked."""
        kind = _kind(key, value, cache, slots)
        if kind is None:
            return
        if len(self._known) >= self._capacity:
            self._known.clear()
        self._known[kind] = launched

    def repeat(
        self,
        key: torch.Tensor,
        value: torch.Tensor | None,
        cache: BoundCache,
        slots: torch.Tensor,
        error: torch.Tensor,
    ) -> bool:
        """Launch for these rows, checked or not, and return True, if rows of their kind have been checked before."""
        launched = self._known.get(_kind(key, value, cache, slots))  # type: ignore[arg-type]  # None is not known
        if launched is None:
            return False
        num_tokens = slots.shape[0]
        if num_tokens == 0 or key.shape[0] != num_tokens or (value is not None and value.shape[0] != num_tokens):
            return False
        address = 0 if value is None else value.data_ptr()
        addresses = key.data_ptr(), address, *cache.addresses, slots.data_ptr(), error.data_ptr()
        return launched.again(addresses, num_tokens, cache.num_slots)


def _kind(key: torch.Tensor, value: torch.Tensor | None, cache: BoundCache, slots: torch.Tensor) -> Kind | None:
    """Return all that is checked and that a kernel is compiled for, but for numbers of rows; None for rare tensors."""
    if not (is_plain(key) and is_plain(slots) and (value is None or is_plain(value))):
        return None
    shape = key.shape
    if len(shape) != 3 or slots.stride() != (1,):
        return None
    values: Kind = ()
    if value is not None:
        sizes = value.shape
        if len(sizes) != 3:
            return None
        values = value.dtype, value.get_device(), sizes[1], sizes[2], value.stride()
    keys = key.dtype, key.get_device(), shape[1], shape[2], key.stride()
    return cache.geometry, slots.dtype, slots.get_device(), keys, values


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether its numbers are those in memory, by its strides."""
    return (
        type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_neg()
    )

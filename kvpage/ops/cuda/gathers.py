"""Gathers: earlier launches of the kernel that gathers rows, so that the next one like them is only made, not derived.

A known kind of call differs in nothing but addresses, the number of sequences, their lengths, and their tables' sizes.
Those are checked at each call.
"""

import operator
from collections.abc import Sequence
from typing import Protocol

import torch

from kvpage.ops.args.bound_cache import BoundCache
from kvpage.ops.args.tokens import Lengths
from kvpage.ops.cuda.launches import CAPACITY, Kind, is_plain

Out = tuple[torch.Tensor, torch.Tensor | None]


class Gathered(Protocol):
    """A launch that can be made again; see kvpage.kernels.gather."""

    def again(
        self,
        addresses: Sequence[int],
        tables: torch.Tensor,
        lengths: list[int],
        starts: list[int] | None,
        num_blocks: int,
        error: torch.Tensor,
    ) -> bool:
        """Launch on other memory, on the current stream. False: it was not done."""


class Gathers:
    """At most `capacity` kinds of launches; when it is full, it starts anew. It keeps no rows alive."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._known: dict[Kind, Gathered] = {}

    def keep(self, cache: BoundCache, tables: torch.Tensor, out: Out, gathered: Gathered) -> None:
        """Keep the launch of a call that was checked."""
        kind = _kind(cache, tables, out)
        if kind is None:
            return
        if len(self._known) >= self._capacity:
            self._known.clear()
        self._known[kind] = gathered

    def repeat(
        self,
        cache: BoundCache,
        tables: torch.Tensor,
        lengths: Lengths,
        starts: Lengths | None,
        out: Out,
        error: torch.Tensor,
    ) -> bool:
        """Gather, and return True, if a call of this kind was checked before and the lengths fit. Else do nothing."""
        gathered = self._known.get(_kind(cache, tables, out))  # type: ignore[arg-type]  # None is not known
        if gathered is None or not isinstance(lengths, list) or not isinstance(starts, list | None):
            return False
        if not _fit(lengths, starts, tables, cache.shape[1], out):
            return False
        key, value = out
        addresses = key.data_ptr(), 0 if value is None else value.data_ptr(), *cache.addresses
        return gathered.again(addresses, tables, lengths, starts, cache.shape[0], error)


def _kind(cache: BoundCache, tables: torch.Tensor, out: Out) -> Kind | None:
    """Return all that is checked and that a kernel is compiled for, but for sizes; None for rare tensors."""
    if type(out) is not tuple or len(out) != 2:
        return None
    key, value = out
    if not (is_plain(tables) and is_plain(key) and (value is None or is_plain(value))):
        return None
    if tables.dim() != 2 or tables.stride(1) != 1:
        return None
    values = None if value is None else _form(value)
    return cache.geometry, tables.dtype, tables.get_device(), _form(key), values


def _form(rows: torch.Tensor) -> Kind:
    """Return all of the rows but how many there are, where that does not tell whether they share memory."""
    shape = rows.shape
    return rows.dtype, rows.get_device(), rows.stride(), shape[1:] if rows.is_contiguous() else shape


def _fit(lengths: list[int], starts: list[int] | None, tables: torch.Tensor, block_size: int, out: Out) -> bool:
    """Return whether the lengths are integers, within the tables, and fill the output or fit into it."""
    num_seqs, max_blocks = tables.shape
    if not _are_counts(lengths, num_seqs):
        return False
    ends = lengths
    if starts is not None:
        if not _are_counts(starts, num_seqs):
            return False
        ends = list(map(operator.add, lengths, starts))
    return max(ends) <= max_blocks * block_size and _are_for(lengths, out)


def _are_counts(counts: list[int], num_seqs: int) -> bool:
    return len(counts) == num_seqs > 0 and set(map(type, counts)) == {int} and min(counts) >= 0


def _are_for(lengths: list[int], out: Out) -> bool:
    """Return whether each part has the room, and memory of its own."""
    key, value = out
    other = key if value is None else value
    if value is not None and key.data_ptr() == value.data_ptr():
        return False
    if key.dim() == 3:
        return sum(lengths) == key.shape[0] == other.shape[0] > 0
    return len(lengths) == key.shape[0] == other.shape[0] and 0 < max(lengths) <= min(key.shape[1], other.shape[1])

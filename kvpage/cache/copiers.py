"""Copiers: copy blocks for a CacheEngine, by kvpage's own BlockCopier or by an operation that a backend brings."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from kvpage.layout.cache_layout import CacheLayout
from kvpage.ops.copies import BlockCopier, check_block_mapping


class Copier(Protocol):
    """Copies blocks between two caches, in all layers. A block_mapping is int64 [num_pairs, 2] on the CPU."""

    def check(self, block_mapping: torch.Tensor) -> None:
        """Raise TypeError or ValueError for a mapping that `run` would refuse."""

    def run(self, block_mapping: torch.Tensor) -> None: ...

    def split_layers(self) -> "Sequence[Copier]":
        """Return one copier for each layer."""


class LayerByLayer:
    """Copies layer by layer with a backend's `swap_blocks(src, dst, block_mapping)`, which checks ids itself."""

    def __init__(
        self,
        operation: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None],
        layers: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        self._operation, self._layers = operation, list(layers)

    def check(self, block_mapping: torch.Tensor) -> None:
        check_block_mapping(block_mapping)

    def run(self, block_mapping: torch.Tensor) -> None:
        self.check(block_mapping)
        for src, dst in self._layers:
            self._operation(src, dst, block_mapping)

    def split_layers(self) -> "list[LayerByLayer]":
        return [LayerByLayer(self._operation, [layer]) for layer in self._layers]


class AllAtOnce:
    """Copies all layers at once with a backend's `copy_blocks(caches, block_mapping)`, which checks the ids itself."""

    def __init__(
        self, operation: Callable[[list[torch.Tensor], torch.Tensor], None], caches: Sequence[torch.Tensor]
    ) -> None:
        self._operation, self._caches = operation, list(caches)

    def check(self, block_mapping: torch.Tensor) -> None:
        check_block_mapping(block_mapping)

    def run(self, block_mapping: torch.Tensor) -> None:
        self.check(block_mapping)
        self._operation(self._caches, block_mapping)

    def split_layers(self) -> "list[AllAtOnce]":
        return [AllAtOnce(self._operation, [cache]) for cache in self._caches]


def swap_copier(
    srcs: Sequence[torch.Tensor], dsts: Sequence[torch.Tensor], layouts: Sequence[CacheLayout], kernel_max_bytes: int
) -> Copier:
    """Return a copier between two tiers: the backend's own, or a BlockCopier. layouts: of each layer."""
    custom = getattr(layouts[0].backend_class, "swap_blocks", None)
    if custom is None:
        return BlockCopier(srcs, dsts, layouts, kernel_max_bytes)
    return LayerByLayer(custom, list(zip(srcs, dsts, strict=True)))


def device_copier(caches: Sequence[torch.Tensor], layouts: Sequence[CacheLayout]) -> Copier:
    """Return a copier within one tier: the backend's own, or a BlockCopier. layouts: of each layer."""
    custom = getattr(layouts[0].backend_class, "copy_blocks", None)
    return BlockCopier(caches, caches, layouts) if custom is None else AllAtOnce(custom, caches)


def no_copier() -> Copier:
    """Return a copier for a stage without attention layers: it checks the mapping's form and copies nothing."""
    return LayerByLayer(lambda src, dst, block_mapping: None, [])

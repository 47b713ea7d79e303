"""StepCaches: the memory that a model's steps compute over: blocks of all groups of layers, and state slots."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from kvpage.cache.cache_engine import CacheEngine
from kvpage.cache.state_cache import StateCache
from kvpage.ops.args.bound_cache import AttentionOfOthers


class StepCaches(NamedTuple):
    """The caches of one model.

    full: of the layers that share the manager's table; it may have no layer. windows: one for each of
    `manager.windows`. states: slots, of which the manager gives out all but the last; None for a model without states.
    """

    full: CacheEngine
    windows: Sequence[CacheEngine] = ()
    states: StateCache | None = None

    @property
    def have_blocks(self) -> bool:
        """Whether a layer attends over blocks."""
        return any(cache.layer_ids for cache in (self.full, *self.windows))

    @property
    def library(self) -> AttentionOfOthers | None:
        """What attends over the full layers in place of kvpage's kernels; None where these do."""
        layer = next(iter(self.full.bound_layers.values()), None)
        return None if layer is None else layer.library

    @property
    def pad_state(self) -> int:
        """The slot that padding computes with, and nobody else; 0 where there are no states."""
        return 0 if self.states is None else self.states.num_slots - 1

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All device memory."""
        blocks = [cache.tensor for engine in (self.full, *self.windows) for cache in engine.bound_caches]
        return blocks if self.states is None else [*blocks, self.states.slots]

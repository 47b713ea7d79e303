"""PoolStates: how many state slots a pool has, and the parts of a pool that has some."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from kvpage.blocks.config import BlockConfig
from kvpage.blocks.groups.states.state_space import States
from kvpage.blocks.manager import BlockManager
from kvpage.cache.cache_engine import CacheEngine
from kvpage.cache.state_cache import StateCache
from kvpage.layout.config import CacheConfig, DeviceConfig
from kvpage.layout.kv_scales import KVScales
from kvpage.serving.generate.states.row_states import RowStates
from kvpage.serving.model.kv_shape import KVShape
from kvpage.serving.model.states.mixer import PieceForward
from kvpage.serving.model.states.model_states import ModelStates
from kvpage.serving.model.states.slot_budget import slots_within, with_tails
from kvpage.serving.params.states import StateConfig

NUM_PROBE_SLOTS = 4


class StatefulParts(NamedTuple):
    """The parts of a pool with states. engine: it has a tail block for each slot, after the blocks of its tier."""

    engine: CacheEngine
    manager: BlockManager
    states: RowStates


@dataclass(frozen=True, slots=True)
class PoolStates:
    """The states of a pool's model. found: in the model. forwards: of its mixers. slots: of each tier."""

    found: ModelStates
    forwards: tuple[PieceForward, ...]
    slots: States

    @classmethod
    def of_model(
        cls,
        model: PreTrainedModel,
        found: ModelStates,
        forwards: tuple[PieceForward, ...],
        cache: CacheConfig,
        budget: StateConfig,
    ) -> "PoolStates":
        """Return the slots that a budget allows, a tail block of each included.

        Raises ValueError for a model that holds states in its modules, and for a budget without a slot.
        """
        name = type(model).__name__
        if found.kv_shape is None or any(mixer.holds for mixer in found.mixers):
            raise ValueError(f"states must be in the cache, beside K and V, those of {name} are not")
        num_bytes = found.layout.slot_bytes + CacheEngine.get_cache_block_size(cache, found.kv_shape.model_config())
        num_most = 2 * cache.num_gpu_blocks
        num_slots = min(slots_within("checkpoint_bytes", budget.device_bytes, num_bytes, least=1), num_most)
        num_host_slots = slots_within("host_checkpoint_bytes", budget.host_checkpoint_bytes, num_bytes)
        num_host_slots = min(num_host_slots, num_most + cache.num_cpu_blocks)
        slots = States(num_slots, num_host_slots, None, budget.checkpoint_every, found.shares_answers)
        return cls(found, forwards, slots)

    def small(self) -> "PoolStates":
        """Return as many slots as a check of the model needs."""
        slots = replace(self.slots, num_slots=NUM_PROBE_SLOTS, num_host_slots=0, checkpoint_every=None)
        return replace(self, slots=slots)

    def make(
        self,
        shape: KVShape,
        cache: CacheConfig,
        device: torch.device,
        kv_scales: Sequence[KVScales] | None,
        blocks: BlockConfig,
    ) -> StatefulParts:
        """Return the parts, with nothing cached. The arguments are those of ModelBlocks.make."""
        manager = BlockManager.of(blocks, groups=[self.slots])
        engine = CacheEngine(
            with_tails(cache, self.slots), shape.model_config(), device_config=DeviceConfig(device), kv_scales=kv_scales
        )
        return StatefulParts(engine, manager, self.of_manager(manager, device))

    def of_manager(self, manager: BlockManager, device: torch.device) -> RowStates:
        """Return the slots, for a manager that has their group."""
        cache = StateCache(self.found.layout, self.slots.num_slots, self.slots.num_host_slots, device)
        return RowStates(manager, cache, self.forwards)

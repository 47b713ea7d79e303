"""PoolStates: how many state slots a pool has, and the parts of a pool that has some."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from kvpage.blocks.groups.states.state_space import States
from kvpage.blocks.manager import BlockManager
from kvpage.blocks.space import HostPolicy
from kvpage.cache.cache_engine import CacheEngine
from kvpage.cache.state_cache import StateCache
from kvpage.layout.config import CacheConfig, DeviceConfig
from kvpage.layout.kv_scales import KVScales
from kvpage.serving.generate.states.row_states import RowStates
from kvpage.serving.model.kv_shape import KVShape
from kvpage.serving.model.states.mixer import PieceForward
from kvpage.serving.model.states.model_states import ModelStates
from kvpage.serving.model.states.slot_budget import slots_within
from kvpage.serving.params.states import StateConfig

NUM_PROBE_SLOTS = 4


class StatefulParts(NamedTuple):
    """The parts of a pool with states. engine: it has a tail block for each slot, after the blocks of its tier."""

    engine: CacheEngine
    manager: BlockManager
    states: RowStates


@dataclass(frozen=True, slots=True)
class PoolStates:
    """The states of a pool's model.

    found: in the model. forwards: of its mixers. device, host: how many slots each tier has.
    checkpoint_every: see StateConfig.
    """

    found: ModelStates
    forwards: tuple[PieceForward, ...]
    device: int
    host: int
    checkpoint_every: int | None

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
        each = found.layout.slot_bytes + CacheEngine.get_cache_block_size(cache, found.kv_shape.model_config())
        num_most = 2 * cache.num_gpu_blocks
        num_slots = min(slots_within("checkpoint_bytes", budget.device_bytes, each, least=1), num_most)
        num_host = slots_within("host_checkpoint_bytes", budget.host_checkpoint_bytes, each)
        num_host = min(num_host, num_most + cache.num_cpu_blocks)
        return cls(found, forwards, num_slots, num_host, budget.checkpoint_every)

    def small(self) -> "PoolStates":
        """Return as many slots as a check of the model needs."""
        return replace(self, device=NUM_PROBE_SLOTS, host=0, checkpoint_every=None)

    def make(
        self,
        shape: KVShape,
        cache: CacheConfig,
        device: torch.device,
        kv_scales: Sequence[KVScales] | None,
        host_policy: HostPolicy | None,
        pin_quota: int,
    ) -> StatefulParts:
        """Return the parts, with nothing cached. The arguments are those of ModelBlocks.make."""
        with_tails = replace(
            cache, num_gpu_blocks=cache.num_gpu_blocks + self.device, num_cpu_blocks=cache.num_cpu_blocks + self.host
        )
        manager = BlockManager(
            cache.num_gpu_blocks,
            cache.block_size,
            num_host_blocks=cache.num_cpu_blocks,
            host_policy=host_policy,
            pin_quota=pin_quota,
            groups=[
                States(
                    self.device,
                    self.host,
                    checkpoint_every=self.checkpoint_every,
                    shares_answers=self.found.shares_answers,
                )
            ],
        )
        states = RowStates(manager, StateCache(self.found.layout, self.device, self.host, device), self.forwards)
        config = shape.model_config()
        engine = CacheEngine(with_tails, config, device_config=DeviceConfig(device), kv_scales=kv_scales)
        return StatefulParts(engine, manager, states)

"""SlotCounts: how many state slots an engine has, and the slots themselves."""

from dataclasses import dataclass, replace

import torch

from kvpage.blocks.groups.states.state_space import States
from kvpage.cache.state_cache import StateCache
from kvpage.layout.config import CacheConfig, ParallelConfig, cache_block_bytes
from kvpage.serving.config import EngineConfig
from kvpage.serving.model.states.model_states import ModelStates
from kvpage.serving.model.states.slot_budget import slots_within


def slot_bytes(cache: CacheConfig, states: ModelStates) -> int:
    """Return the bytes of a state and of its tail block."""
    return states.layout.slot_bytes + cache_block_bytes(cache, states.model_config, ParallelConfig())


@dataclass(frozen=True, slots=True)
class SlotCounts:
    """How many state slots each tier has. Each slot has a tail block, which comes after the blocks of its tier.

    One more slot of the device is that of padding, see RankCaches. It has no tail block.
    device: of running sequences and of checkpoints. checkpoints: of the latter, at most. host: of checkpoints and of
    sequences that are swapped out. shares_answers: see States.
    """

    device: int
    checkpoints: int
    host: int
    shares_answers: bool = True

    @classmethod
    def of(cls, config: EngineConfig, states: ModelStates) -> "SlotCounts":
        """Return the counts that the budget allows, a tail block of each slot included.

        ValueError for a budget that is less than one slot, and not 0.
        """
        cache, budget = config.cache_config, config.states
        num_bytes = slot_bytes(cache, states)
        num_kept = slots_within("checkpoint_bytes", budget.device_bytes, num_bytes)
        num_kept = min(num_kept, cache.num_gpu_blocks)
        num_host = slots_within("host_checkpoint_bytes", budget.host_checkpoint_bytes, num_bytes)
        num_host = min(num_host, cache.num_gpu_blocks + cache.num_cpu_blocks)
        return cls(config.max_num_seqs + num_kept, num_kept, num_host, states.shares_answers)

    def with_tails(self, cache: CacheConfig) -> CacheConfig:
        """Return the config of a cache that has the tail blocks, too."""
        return replace(
            cache, num_gpu_blocks=cache.num_gpu_blocks + self.device, num_cpu_blocks=cache.num_cpu_blocks + self.host
        )

    def slots(self, states: ModelStates, device: torch.device) -> StateCache:
        """Return the slots, on the device of the model, with that of padding."""
        return StateCache(states.layout, self.device + 1, self.host, device)

    def options(self, config: EngineConfig) -> States:
        """Return the group's options for the manager."""
        return States(self.device, self.host, self.checkpoints, config.states.checkpoint_every, self.shares_answers)

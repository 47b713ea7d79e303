"""StateParts: the state slots of an engine, and the manager that gives them out beside blocks."""

from dataclasses import dataclass, replace

import torch

from kvpage.blocks.hybrid.manager import HybridManager
from kvpage.blocks.load_or_compute import LoadOrCompute
from kvpage.cache.cache_engine import CacheEngine
from kvpage.cache.state_cache import StateCache
from kvpage.layout.config import CacheConfig
from kvpage.serving.config import EngineConfig
from kvpage.serving.model.states.model_states import ModelStates
from kvpage.serving.model.states.slot_budget import slots_within


@dataclass(frozen=True, slots=True)
class SlotCounts:
    """How many state slots each tier has. Each slot has a tail block, which comes after the blocks of its tier.

    device: of running sequences and of checkpoints. checkpoints: of the latter, at most. host: of checkpoints and of
    sequences that are swapped out. shares_answers: see HybridManager.
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
        slot_bytes = states.layout.slot_bytes
        if not states.model_config.is_attention_free:
            slot_bytes += CacheEngine.get_cache_block_size(cache, states.model_config)
        num_kept = slots_within("checkpoint_bytes", budget.checkpoint_bytes, slot_bytes)
        num_kept = min(num_kept, cache.num_gpu_blocks)
        num_host = slots_within("host_checkpoint_bytes", budget.host_checkpoint_bytes, slot_bytes)
        num_host = min(num_host, cache.num_gpu_blocks + cache.num_cpu_blocks)
        return cls(config.max_num_seqs + num_kept, num_kept, num_host, states.shares_answers)

    def with_tails(self, cache: CacheConfig) -> CacheConfig:
        """Return the config of a cache that has the tail blocks, too."""
        return replace(
            cache, num_gpu_blocks=cache.num_gpu_blocks + self.device, num_cpu_blocks=cache.num_cpu_blocks + self.host
        )

    def slots(self, states: ModelStates, device: torch.device) -> StateCache:
        """Return the slots, on the device of the model."""
        return StateCache(states.layout, self.device, self.host, device)

    def manager(self, config: EngineConfig, rule: LoadOrCompute | None) -> HybridManager:
        """Return the manager of the blocks and slots of both tiers."""
        cache = config.cache_config
        return HybridManager(
            cache.num_gpu_blocks,
            cache.block_size,
            config.enable_prefix_caching,
            num_slots=self.device,
            num_host_slots=self.host,
            num_checkpoints=self.checkpoints,
            checkpoint_every=config.states.checkpoint_every,
            num_host_blocks=cache.num_cpu_blocks,
            host_policy=config.host_policy,
            rule=rule,
            pin_quota=config.pin_quota,
            shares_answers=self.shares_answers,
        )

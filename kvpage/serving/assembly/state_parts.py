"""The state slots of an engine: how many of them its budget allows, and their bytes."""

from kvpage.blocks.groups.states.state_space import States
from kvpage.layout.config import CacheConfig, ParallelConfig, cache_block_bytes
from kvpage.serving.config import EngineConfig
from kvpage.serving.model.states.model_states import ModelStates
from kvpage.serving.model.states.slot_budget import slots_within


def slot_bytes(cache: CacheConfig, states: ModelStates) -> int:
    """Return the bytes of a state and of its tail block."""
    return states.layout.slot_bytes + cache_block_bytes(cache, states.model_config, ParallelConfig())


def slots_of(config: EngineConfig, states: ModelStates) -> States:
    """Return the slots that the budget allows, a tail block of each included.

    On the device they are those of running sequences and of checkpoints, on the host those of checkpoints and of
    sequences that are swapped out. The slot of padding comes besides, without a tail block: see RankCaches.

    ValueError for a budget that is less than one slot, and not 0.
    """
    cache, budget = config.cache_config, config.states
    num_bytes = slot_bytes(cache, states)
    num_checkpoints = slots_within("checkpoint_bytes", budget.device_bytes, num_bytes)
    num_checkpoints = min(num_checkpoints, cache.num_gpu_blocks)
    num_host_slots = slots_within("host_checkpoint_bytes", budget.host_checkpoint_bytes, num_bytes)
    num_host_slots = min(num_host_slots, cache.num_gpu_blocks + cache.num_cpu_blocks)
    num_slots = config.max_num_seqs + num_checkpoints
    return States(num_slots, num_host_slots, num_checkpoints, budget.checkpoint_every, states.shares_answers)

"""The states of an engine's model, or the reason why it cannot be served; the slots that their budget allows."""

from transformers import PreTrainedModel

from kvpage.blocks.groups.states.state_space import States
from kvpage.checks.errors import OptionError
from kvpage.layout.config import CacheConfig, ModelConfig, ParallelConfig, cache_block_bytes
from kvpage.serving.config import EngineConfig
from kvpage.serving.model.config_check import check_config, check_divides
from kvpage.serving.model.states.model_states import ModelStates, check_states_are_cached, keeps_states
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


def found_states(model: PreTrainedModel, config: EngineConfig) -> ModelStates | None:
    """Return what the layers of a model keep besides K and V; None for K and V alone. The model computes two tokens.

    ValueError for layers of unknown types, for states outside of the cache or that do not fit into slots, and for KV
    heads that cannot be split over the ranks. OptionError for an option that does not go with states.
    """
    check_config(model, takes_states=True)
    check_states_are_cached(model)
    if not keeps_states(model.config):
        return None
    name = type(model).__name__
    for option, is_given, value in (
        ("compile_model", config.compile_model, "False"),
        ("backend", config.cache_config.backend == "mla", "another than 'mla'"),
        ("blend", config.blend is not None, "None"),
    ):
        if is_given:
            raise OptionError(f"{option} must be {value} for a model whose layers keep states, {name} does")
    if config.tensor_parallel_size > 1:
        num_all_heads = ModelConfig.from_hf(model.config, model.dtype).num_kv_heads
        check_divides(name, num_all_heads, config.tensor_parallel_size)
    return ModelStates.of_model(model)

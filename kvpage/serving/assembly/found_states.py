"""The states of a model that is to be served: found by computing a little, or refused with the reason."""

from transformers import PreTrainedModel

from kvpage.checks.errors import OptionError
from kvpage.layout.config import ModelConfig
from kvpage.serving.config import EngineConfig
from kvpage.serving.model.config_check import check_config, check_divides
from kvpage.serving.model.states.model_states import ModelStates, check_states_are_cached, keeps_states


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

"""The parts of a pool that computes the same bits: an engine's runner over blocks, and a view to call `generate` on."""

from collections.abc import Sequence
from typing import NamedTuple

from transformers import PreTrainedModel

from kvpage.blocks.config import BlockConfig
from kvpage.blocks.manager import BlockManager
from kvpage.cache.cache_engine import CacheEngine
from kvpage.cache.state_cache import StateCache
from kvpage.layout.config import CacheConfig
from kvpage.layout.kv_scales import KVScales
from kvpage.serving.assembly.parts import ServableModel, check_servable, make_cache
from kvpage.serving.config import EngineConfig
from kvpage.serving.generate.states.pool_states import PoolStates
from kvpage.serving.generate.states.row_states import RowStates
from kvpage.serving.generate.view.bits_view import bits_view
from kvpage.serving.model.kv_shape import KVShape
from kvpage.serving.model.native.bits.numerics import numerics_name
from kvpage.serving.model.runner import ModelRunner
from kvpage.serving.params.states import StateConfig


class ViewParts(NamedTuple):
    """The arguments of ModelBlocks, in their order."""

    view: PreTrainedModel
    shape: KVShape
    engine: CacheEngine
    manager: BlockManager
    max_working_bytes: None
    states: RowStates | None
    runner: ModelRunner


def view_parts(
    model: PreTrainedModel,
    cache_config: CacheConfig,
    kv_scales: Sequence[KVScales] | None,
    budget: StateConfig,
    blocks: BlockConfig,
) -> ViewParts:
    """Return the parts, with nothing cached. A little is computed with the model.

    budget: of states. blocks: the options of the manager. OptionError where the model, or the machine, cannot have the
    same bits; ValueError for one that cannot be served from such blocks.
    """
    config = EngineConfig(cache_config, kv_scales=kv_scales, same_bits=True)
    servable = check_servable(model, config)
    shape = KVShape.of_model(model) if servable.states is None else servable.states.kv_shape
    pool_states = _states_of(servable, cache_config, budget)
    assert shape is not None, "states alone are refused"
    check_backend(model, shape, cache_config)
    slots = None if pool_states is None else pool_states.slots
    engine = make_cache(servable, config, slots)
    engine.numerics = numerics_name()
    manager = BlockManager.of(blocks, groups=[] if slots is None else [slots])
    states = None
    if pool_states is not None and slots is not None:
        state_cache = StateCache(pool_states.found.layout, slots.num_slots, slots.num_host_slots, model.device)
        states = RowStates(manager, state_cache, ())
    view = bits_view(servable.runner, engine)
    return ViewParts(view, shape, engine, manager, None, states, servable.runner)


def _states_of(servable: ServableModel, cache_config: CacheConfig, budget: StateConfig) -> PoolStates | None:
    """Return the states of a pool. ValueError for a model that keeps some elsewhere, or a budget without a slot."""
    if servable.states is None:
        return None
    return PoolStates.of_model(servable.runner.model, servable.states, (), cache_config, budget)


def check_backend(model: PreTrainedModel, shape: KVShape, cache_config: CacheConfig) -> None:
    """Raise ValueError unless the blocks are of latents exactly where a model hands latents to its cache."""
    if shape.is_latent != (cache_config.backend == "mla"):
        handed = "latents" if shape.is_latent else "K and V of heads"
        raise ValueError(
            f"backend must be 'mla' exactly where a model hands latents to its cache, {type(model).__name__} hands "
            f"{handed} to {cache_config.backend!r}"
        )

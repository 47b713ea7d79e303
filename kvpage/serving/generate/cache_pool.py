"""KVPageCachePool: the blocks of a model that has passed the checks, for KVPageCaches that come and go."""

from collections.abc import Sequence
from dataclasses import replace

from transformers import PreTrainedModel

from kvpage.blocks.config import BlockConfig, HostPolicy
from kvpage.blocks.manager import BlockManager
from kvpage.checks.errors import OptionError
from kvpage.checks.interrupts import uninterrupted
from kvpage.checks.values import as_integer
from kvpage.layout.config import CacheConfig, ParallelConfig
from kvpage.layout.kv_scales import KVScales
from kvpage.serving.assembly.parts import check_servable, make_cache
from kvpage.serving.config import EngineConfig
from kvpage.serving.generate.model_blocks import ModelBlocks, check_eval
from kvpage.serving.generate.pool_check import verify_blocks
from kvpage.serving.generate.states.pool_states import PoolStates
from kvpage.serving.generate.view.bits_view import bits_view
from kvpage.serving.model.argument_check import check_model
from kvpage.serving.model.config_check import check_config
from kvpage.serving.model.hf_cache.argument import checked_cache_argument
from kvpage.serving.model.kv_shape import KVShape
from kvpage.serving.model.native.bits.numerics import numerics_name
from kvpage.serving.model.probe import unquantized
from kvpage.serving.model.states.mixer_forward import MixerForward
from kvpage.serving.model.states.model_states import ModelStates, check_states_are_cached, keeps_states
from kvpage.serving.model.window_check import check_windows, short_windows
from kvpage.serving.params.states import StateConfig


class KVPageCachePool(ModelBlocks):
    """Blocks of one model for `model.generate`, shared by the KVPageCaches over them. Make it by `from_model`.

    It owns the cache tensors (`engine`) and the block manager (`manager`). The model stays the caller's. `model` is
    what `generate` is called on: the caller's model or, with `same_bits`, a view over the same weights.

    Blocks are valid for the model's weights as they are. After a change of weights in place, call `reset_prefix_cache`.
    Give each adapter a namespace of its own.
    """

    @classmethod
    def from_model(
        cls,
        model: PreTrainedModel,
        cache_config: CacheConfig,
        *,
        share_parts: bool = True,
        host_policy: HostPolicy | None = None,
        pin_quota: int = 0,
        kv_scales: Sequence[KVScales] | None = None,
        max_working_bytes: int | None = None,
        states: StateConfig | None = None,
        same_bits: bool = False,
    ) -> "KVPageCachePool":
        """Make a pool on the model's device, with as many blocks in each tier as the config says.

        Blocks hold the K and V that the model hands to its cache. DeepSeek's models hand over latents in newer versions
        of transformers: the config's backend must then be "mla". In older ones they hand over expanded K and V.

        Args:
            model: a decoder of transformers in eval mode. A few tokens are computed with it.
            cache_config: the layout, and the number of blocks on the device (at least 1) and on the host.
            share_parts: as of BlockConfig. So are host_policy and pin_quota.
            kv_scales: one KVScales a layer, for caches of 8-bit floats: see CacheEngine.
            max_working_bytes: the most bytes on the device, beside the blocks, for K and V in one piece. Caches in use
                take as much as their rows' blocks, and a quarter of that or 64 tokens a row. Without room, each forward
                gathers K and V, one layer at a time. None: no limit. 0, and blocks that quantise: always gather.
            states: the budget of the states of a model whose layers keep some, of rows in use and checkpoints together;
                None for the default. Other models do not read it.
            same_bits: whether logits are functions of the model and a row's tokens alone, bit by bit, on a CPU. Call
                `generate` on the pool's `model` then. Blocks are read in place, `max_working_bytes` is not.

        Returns:
            The pool, with nothing cached.

        Raises:
            TypeError: for a model, a config or an option of another type.
            ValueError: with the reason, for a model or a machine that cannot have the same bits; for a model that keeps
                more than K and V, and states beside them in `past_key_values`; whose K and V do not fit into blocks of
                this layout, whose sliding window is not in its mask, that is compiled or in training mode; for a cache
                without blocks, and a budget without a state; for scales that the cache does not take or that distort
                the logits.
        """
        check_model(model)
        _check_options(cache_config, max_working_bytes, same_bits)
        budget = _checked_budget(states)
        _check_cacheable(model)
        blocks = BlockConfig.of_cache(
            cache_config, share_parts=share_parts, host_policy=host_policy, pin_quota=pin_quota
        )
        if same_bits:
            return cls._of_view(model, cache_config, kv_scales, budget, blocks)
        pool_states = _found_states(model, cache_config, budget)
        shape = KVShape.of_model(model) if pool_states is None else pool_states.found.kv_shape
        assert shape is not None
        _check_backend(model, shape, cache_config)
        check_windows(model)
        _verify(model, shape, cache_config, kv_scales, pool_states)
        pool = cls.make(model, shape, cache_config, kv_scales, blocks, max_working_bytes, pool_states)
        assert isinstance(pool, cls)
        return pool

    @classmethod
    def _of_view(
        cls,
        model: PreTrainedModel,
        cache_config: CacheConfig,
        kv_scales: Sequence[KVScales] | None,
        budget: StateConfig,
        blocks: BlockConfig,
    ) -> "KVPageCachePool":
        """Return a pool whose model is a view. Raises as `from_model` does."""
        if model.device.type != "cpu":
            raise OptionError(f"same_bits must be False for `generate` on {model.device}: an engine there may have it")
        config = EngineConfig(cache_config, kv_scales=kv_scales, same_bits=True)
        servable = check_servable(model, config)
        of_model = servable.states
        shape = KVShape.of_model(model) if of_model is None else of_model.kv_shape
        states = None if of_model is None else PoolStates.of_model(model, of_model, (), cache_config, budget)
        assert shape is not None, "a model with states alone is refused"
        _check_backend(model, shape, cache_config)
        engine = make_cache(servable, config, None if states is None else states.slots)
        engine.numerics = numerics_name()
        manager = BlockManager.of(blocks, groups=[] if states is None else [states.slots])
        row_states = None if states is None else states.of_manager(manager, model.device)
        return cls(
            bits_view(servable.runner, engine), shape, engine, manager, states=row_states, runner=servable.runner
        )

    @uninterrupted
    def reset_prefix_cache(self) -> None:
        """Forget all that is cached, in both tiers, and end all pins. Call it after a change of weights in place.

        Raises:
            RuntimeError: with nothing forgotten, while a KVPageCache of the pool is not released. Its K and V are those
                of the weights before.
        """
        self.release_forgotten()
        self.manager.reset_prefix_cache()


FIRST_VERSION = "5.14"  # of transformers: before, masks of the whole prompt come with rows that begin within it


def _check_options(cache_config: CacheConfig, max_working_bytes: int | None, same_bits: bool) -> None:
    _check_cache_config(cache_config)
    if max_working_bytes is not None and as_integer("max_working_bytes", max_working_bytes) < 0:
        raise ValueError(f"max_working_bytes must not be negative, got {max_working_bytes}")
    if not isinstance(same_bits, bool):
        raise TypeError(f"same_bits must be a bool, got {type(same_bits).__name__}")


def _found_states(model: PreTrainedModel, cache_config: CacheConfig, budget: StateConfig) -> PoolStates | None:
    if not keeps_states(model.config):
        check_config(model)
        return None
    model_states = ModelStates.of_model(model)
    forwards = tuple(MixerForward(mixer, mixer.module) for mixer in model_states.mixers)
    states = PoolStates.of_model(model, model_states, forwards, cache_config, budget)
    if short_windows(model):
        raise ValueError(f"layers must not have windows beside states, those of {type(model).__name__} have both")
    return states


def _verify(
    model: PreTrainedModel,
    shape: KVShape,
    cache_config: CacheConfig,
    kv_scales: Sequence[KVScales] | None,
    states: PoolStates | None,
) -> None:
    """Compute over a few small blocks of the model's dtype and, where the cache quantises, over such blocks too."""
    small = replace(cache_config, block_size=2, num_gpu_blocks=16, num_cpu_blocks=0)
    few = None if states is None else states.small()
    verify_blocks(ModelBlocks.make(model, shape, unquantized(small, shape.model_config()), None, states=few))
    if cache_config.layout(shape.model_config(), ParallelConfig()).is_quantized:
        verify_blocks(ModelBlocks.make(model, shape, small, kv_scales, states=few))


def _check_cacheable(model: PreTrainedModel) -> None:
    check_config(model, takes_states=True)
    checked_cache_argument(model)
    check_states_are_cached(model, FIRST_VERSION)
    check_eval(model)


def _check_backend(model: PreTrainedModel, shape: KVShape, cache_config: CacheConfig) -> None:
    if shape.is_latent != (cache_config.backend == "mla"):
        handed = "latents" if shape.is_latent else "K and V of heads"
        raise ValueError(
            f"backend must be 'mla' exactly where a model hands latents to its cache, {type(model).__name__} hands "
            f"{handed} to {cache_config.backend!r}"
        )


def _checked_budget(states: StateConfig | None) -> StateConfig:
    """Return the budget of states. TypeError for anything else."""
    if not isinstance(states, StateConfig | None):
        raise TypeError(f"states must be a StateConfig, got {type(states).__name__}")
    return StateConfig() if states is None else states


def _check_cache_config(cache_config: CacheConfig) -> None:
    if not isinstance(cache_config, CacheConfig):
        raise TypeError(f"cache_config must be a CacheConfig, got {type(cache_config).__name__}")
    if cache_config.num_gpu_blocks == 0:
        raise ValueError("num_gpu_blocks must be positive, got 0")

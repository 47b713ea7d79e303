"""The parts of an engine that every rank makes: a model that was tried out over blocks, and its caches.

model, EngineConfig ─► checks, and a little computed over blocks ─► ServableModel ─► RankParts
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvpage.blocks.groups.states.state_space import States
from kvpage.blocks.groups.window_blocks import Window
from kvpage.cache.cache_engine import CacheEngine
from kvpage.cache.state_cache import StateCache
from kvpage.layout.config import CacheConfig, DeviceConfig, ModelConfig, ParallelConfig
from kvpage.layout.kv_scales import KVScales
from kvpage.ops.cuda.libraries.choice import LIBRARY_ERRORS, Candidate, candidates
from kvpage.ops.cuda.libraries.library import AttentionLibrary
from kvpage.ops.cuda.libraries.rules import OURS
from kvpage.ops.cuda.served import check_served
from kvpage.serving.assembly.state_parts import found_states, slots_of
from kvpage.serving.assembly.window_groups import WindowGroups, short_windows
from kvpage.serving.config import EngineConfig
from kvpage.serving.loop.ranks.rank_caches import RankCaches
from kvpage.serving.loop.ranks.rank_lost import RankLost
from kvpage.serving.loop.ranks.sharding import check_heads, check_sharded_size, scales_of_this_rank
from kvpage.serving.model.argument_check import check_model
from kvpage.serving.model.attention import HeadAttention
from kvpage.serving.model.attention_shapes import with_seen_shapes
from kvpage.serving.model.config_check import check_config, check_divides
from kvpage.serving.model.kv_calibration import choose_scales
from kvpage.serving.model.latent_check import check_latents, verify_latents
from kvpage.serving.model.limits import limited_model_len
from kvpage.serving.model.native.bits.device_bits import DeviceBits, check_device_bits
from kvpage.serving.model.native.bits.numerics import numerics_name
from kvpage.serving.model.native.bits.row_bits import RowBits
from kvpage.serving.model.native.device import DeviceLayers
from kvpage.serving.model.native.layers import NativeLayers
from kvpage.serving.model.native.torch_threads import TorchThreads
from kvpage.serving.model.paged_check import verify_bits, verify_model, verify_quantized
from kvpage.serving.model.runner import ModelRunner
from kvpage.serving.model.states.model_states import ModelStates
from kvpage.serving.model.states.slot_budget import with_tails
from kvpage.serving.params.defaults import ParamDefaults

logger = logging.getLogger(__name__)


class ChosenAttention(NamedTuple):
    """library: attends over blocks; None for kvpage's kernels. windows: of each layer, see verify_model."""

    library: AttentionLibrary | None
    windows: dict[int, int | None]

    @property
    def window(self) -> int | None:
        """The widest window of any layer; None if one sees everything."""
        sizes = [size for size in self.windows.values() if size is not None]
        return max(sizes) if sizes and len(sizes) == len(self.windows) else None


@dataclass(frozen=True, slots=True)
class ServableModel:
    """A model that was tried out over blocks.

    config: with the KV heads of this rank. num_all_heads: those of all ranks.
    attention: what attends over blocks, and the windows of layers.
    states: what it keeps besides K and V; None for nothing.
    """

    runner: ModelRunner
    config: ModelConfig
    attention: ChosenAttention
    num_all_heads: int
    states: ModelStates | None = None


@dataclass(frozen=True, slots=True)
class RankParts:
    """The parts of an engine that every rank has.

    max_model_len: tokens of a request at most.
    groups: options of the manager's groups. shares_blocks: whether layers with windows share the blocks of the others.
    """

    caches: RankCaches
    defaults: ParamDefaults
    max_model_len: int
    groups: Sequence[Window | States]
    shares_blocks: bool


def check_arguments(model: PreTrainedModel, config: EngineConfig, tokenizer: object = None) -> None:
    """TypeError for others than a model and an EngineConfig, ValueError for a model that is compiled or ill sharded.

    ValueError also for a model on a GPU that has no kernels.
    """
    if tokenizer is not None and not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise TypeError(f"tokenizer must be a tokenizer of transformers or None, got {type(tokenizer).__name__}")
    check_model(model)
    if not isinstance(config, EngineConfig):
        hint = ": give EngineConfig(cache_config)" if isinstance(config, CacheConfig) else ""
        raise TypeError(f"config must be an EngineConfig, got {type(config).__name__}{hint}")
    check_sharded_size(model, config.tensor_parallel_size)
    check_served(model.device)


@contextmanager
def without_autocast(device: torch.device) -> Iterator[None]:
    """Compute in the model's own dtype, whatever is around: an engine is the same wherever it is made."""
    if not torch.is_autocast_enabled(device.type):
        yield
        return
    with torch.autocast(device.type, enabled=False):
        yield


def check_servable(model: PreTrainedModel, config: EngineConfig) -> ServableModel:
    """Compute a little with the model over blocks. ValueError if it cannot be served from such blocks."""
    with without_autocast(model.device):
        return _tried_out(model, config, found_states(model, config))


def _tried_out(model: PreTrainedModel, config: EngineConfig, states: ModelStates | None) -> ServableModel:
    cache_config, of_all = config.cache_config, _model_config(model, config, states)
    size, compiles = config.tensor_parallel_size, config.compile_model
    native, row_bits = _native_layers(model, config), None
    if config.same_bits:
        row_bits = _row_bits(model, config, TorchThreads() if native is None else native.threads, states is not None)
        states = None if states is None else states.with_fixed_scans(type(model).__name__)
    runner = ModelRunner(model, native, compiles=compiles, holds_interrupts=size > 1, states=states, row_bits=row_bits)
    with _names_compiler() if compiles else nullcontext():
        if states is None:
            model_config = _shapes_of_this_rank(runner, cache_config, of_all, size)
        else:
            model_config = states.model_config
            check_heads(type(model).__name__, model_config, of_all.num_kv_heads, size)
        if config.blend is not None:
            model_config = padded(model_config)
        if model_config.use_mla:
            verify_latents(runner, cache_config, model_config)
        name = OURS if isinstance(row_bits, DeviceBits) else config.attention_backend
        takes_windows = isinstance(config.num_window_blocks, int)
        attention = choose_attention(runner, cache_config, model_config, name, size, takes_windows)
        if attention.library is not None and takes_own_blocks(config, attention, model, states):
            attention = choose_attention(runner, cache_config, model_config, name, takes_windows=True)
    if row_bits is not None:
        verify_bits(runner, cache_config, model_config)
    num_all_heads = model_config.num_kv_heads if size == 1 else of_all.num_kv_heads
    return ServableModel(runner, model_config, attention, num_all_heads, states)


def _shapes_of_this_rank(runner: ModelRunner, cache_config: CacheConfig, config: ModelConfig, size: int) -> ModelConfig:
    """Return the config with the shapes of one rank's K and V, as its attention gets them. All ranks call it at once.

    Raises ValueError if the heads cannot be split over the ranks, or if layers with unlike numbers of heads would be.
    """
    if config.use_mla:
        return config
    name = type(runner.model).__name__
    check_divides(name, config.num_kv_heads, size)
    seen = with_seen_shapes(runner, cache_config, config)
    check_heads(name, seen, config.num_kv_heads, size)
    return seen


def takes_own_blocks(
    config: EngineConfig, attention: ChosenAttention, model: PreTrainedModel, states: ModelStates | None
) -> bool:
    """Return whether "auto" gives the model's windows blocks of their own, where memory allows it."""
    if config.num_window_blocks != "auto" or states is not None:
        return False
    return bool(short_windows(attention.windows, limited_model_len(model, config.max_model_len)))


def padded(config: ModelConfig) -> ModelConfig:
    """Return the config with all layers of one shape, the largest sizes, and K and V of their own, for blending.

    ValueError for layers with unlike numbers of heads.
    """
    counts = {shape.num_kv_heads for shape in config.layer_shapes or () if shape is not None}
    if len(counts) > 1:
        raise ValueError(f"blend must be None for a model whose layers have {sorted(counts)} KV heads")
    return replace(config, layer_shapes=None, shared_layers=())


@contextmanager
def _names_compiler() -> Iterator[None]:
    """Raise ValueError for errors of torch.compile, as of a machine without a compiler."""
    from torch._dynamo.exc import TorchDynamoException

    try:
        yield
    except TorchDynamoException as error:
        reason = " ".join(str(error).partition("\n\n")[0].split())  # hints for developers of torch follow
        raise ValueError(f"compile_model must be False, torch.compile cannot compile the model: {reason}") from error


def choose_attention(
    runner: ModelRunner,
    cache_config: CacheConfig,
    model_config: ModelConfig,
    name: str,
    num_ranks: int = 1,
    takes_windows: bool = False,
) -> ChosenAttention:
    """Return the first library that computes the model's own logits over a few blocks, or kvpage's kernels.

    Several ranks try as many, or their collectives would not meet: the first one only.
    model_config: with the KV heads of this rank. name: "auto", "kvpage", or a library's.
    takes_windows: whether tables will lack the blocks behind windows. Libraries may read these, and do not attend.

    ValueError for a model that cannot be served, or not by the named library, or not by the first one on several ranks.
    """
    for make in [] if takes_windows else _candidates(name, cache_config, model_config, runner.model.device):
        try:
            library = make()
            return ChosenAttention(library, verify_model(runner, cache_config, model_config, library))
        except RankLost:
            raise
        except LIBRARY_ERRORS as error:
            if num_ranks > 1 and name == "auto":
                rule = f"attention_backend must name another than {make.name}, which 'auto' takes on {num_ranks} ranks"
                raise ValueError(f"{rule} and which cannot serve this model: {error}") from error
            if name != "auto":
                raise ValueError(f"attention_backend {name!r} cannot serve this model: {error}") from error
            logger.warning("attention_backend 'auto' leaves out %s: %s", make.name, error)
    return ChosenAttention(None, verify_model(runner, cache_config, model_config))


def _candidates(
    name: str, cache_config: CacheConfig, model_config: ModelConfig, device: torch.device
) -> list[Candidate]:
    """Return the libraries to try: none for a model without attention."""
    if model_config.is_attention_free:
        return []
    if len(set(cache_config.layouts(model_config, ParallelConfig()))) > 1:
        if name not in ("auto", OURS):
            raise ValueError(f"attention_backend must be 'auto' or {OURS!r} for layers of unlike shapes, got {name!r}")
        return []
    return candidates(name, cache_config.layout(model_config, ParallelConfig()), device)


def attend_with(cache: CacheEngine, library: AttentionLibrary | None) -> None:
    """Let `library` attend over the blocks of all layers."""
    for layer in cache.bound_layers.values():
        layer.use_library(library)


def assemble_rank(servable: ServableModel, config: EngineConfig) -> RankParts:
    """Make the parts that every rank has: all ranks check, and compute, the same. Raises as Engine.from_model does."""
    model, states = servable.runner.model, servable.states
    defaults = ParamDefaults.of_model(model, config.generation_config)
    max_model_len = limited_model_len(model, config.max_model_len)
    windows = WindowGroups.of(config, servable.attention.windows, max_model_len)
    slots = None if states is None else slots_of(config, states)
    with without_autocast(model.device):
        if windows is None:
            full, of_windows = make_cache(servable, config, slots), []
        else:
            full, *of_windows = _group_caches(servable, config, windows, slots)
        state_cache = None
        if states is not None and slots is not None:
            num_slots = slots.num_slots + 1  # with that of padding
            state_cache = StateCache(states.layout, num_slots, slots.num_host_slots, model.device)
    if config.same_bits:
        for cache in (full, *of_windows):
            cache.numerics = numerics_name(model.device)
    groups = [*(windows.options() if windows else ()), *([slots] if slots else ())]
    return RankParts(RankCaches(full, of_windows, state_cache), defaults, max_model_len, groups, windows is None)


def _native_layers(model: PreTrainedModel, config: EngineConfig) -> NativeLayers | DeviceLayers | None:
    if not config.native_layers or config.compile_model:
        return None
    if model.device.type == "cuda":
        return DeviceLayers(HeadAttention())
    return NativeLayers(config.same_bits) if model.device.type == "cpu" else None


def _row_bits(model: PreTrainedModel, config: EngineConfig, threads: TorchThreads, has_states: bool) -> RowBits:
    if model.device.type != "cuda":
        return RowBits.of_model(model, threads)
    check_device_bits(
        model,
        has_states=has_states,
        backend=config.cache_config.backend,
        blends=config.blend is not None,
        native_layers=config.native_layers,
        attention_backend=config.attention_backend,
    )
    return DeviceBits.of_model(model, threads)


def _model_config(model: PreTrainedModel, config: EngineConfig, states: ModelStates | None) -> ModelConfig:
    """Return the config with the KV heads of all ranks."""
    if states is not None:
        is_whole = config.tensor_parallel_size == 1
        return states.model_config if is_whole else ModelConfig.from_hf(model.config, model.dtype)
    check_config(model)
    keeps_latents = config.cache_config.backend == "mla"
    if keeps_latents:
        check_latents(model.config.get_text_config(decoder=True), type(model).__name__)
    return ModelConfig.from_hf(model.config, model.dtype, use_mla=keeps_latents)


def make_cache(servable: ServableModel, config: EngineConfig, slots: States | None = None) -> CacheEngine:
    """Return the cache with its scales. ValueError where it quantises, and nothing of the model is left."""
    runner, model_config, cache_config = servable.runner, servable.config, with_tails(config.cache_config, slots)
    if model_config.is_attention_free:
        return CacheEngine(cache_config, model_config, device_config=DeviceConfig(runner.model.device))
    scales = _scales(servable, config, cache_config)
    device_config = DeviceConfig(runner.model.device)
    cache = CacheEngine(cache_config, model_config, device_config=device_config, kv_scales=scales)
    attend_with(cache, servable.attention.library)
    if cache.layout.is_quantized:
        verify_quantized(runner, cache_config, model_config, scales, servable.attention.library)
    return cache


def _scales(servable: ServableModel, config: EngineConfig, cache_config: CacheConfig) -> Sequence[KVScales] | None:
    heads = servable.config.num_kv_heads, servable.num_all_heads
    kv_scales = scales_of_this_rank(config.kv_scales, *heads)
    return choose_scales(servable.runner, cache_config, servable.config, kv_scales, config.calibration_tokens)


def _group_caches(
    servable: ServableModel, config: EngineConfig, groups: WindowGroups, slots: States | None
) -> list[CacheEngine]:
    """Return the cache of the full layers, then those of windows. ValueError as `make_cache`."""
    cache_config, model_config = config.cache_config, servable.config
    scales = _scales(servable, config, cache_config)
    caches = groups.caches(cache_config, model_config, servable.runner.model.device, scales, slots)
    if caches[-1].layout.is_quantized:
        verify_quantized(servable.runner, cache_config, model_config, scales)
    return caches

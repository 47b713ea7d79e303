"""load: a model from a folder, with its tokenizer, an engine over it and its store."""

import logging
from dataclasses import dataclass
from typing import Any, cast

import torch
import transformers

from kvpage.layout.config import CacheConfig
from kvpage.observe.events.config import EventConfig
from kvpage.server.command.options import ServeOptions
from kvpage.serving import AsyncEngine, AsyncEngineConfig, Engine, EngineConfig, StateConfig
from kvpage.serving.assembly.model_files import load_model_files, load_tokenizer_files
from kvpage.serving.assembly.weights_digest import weights_digest
from kvpage.serving.config import AttentionBackendName
from kvpage.serving.params.defaults import GenerationDefaults
from kvpage.serving.sessions.config import SessionConfig
from kvpage.store import KVStore, KVStoreConfig, metadata_of
from kvpage.store.config import parse_size

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that can be served.

    Attributes:
        engine: The engine, with its thread. Close it before the store.
        tokenizer: The model's tokenizer.
        model: The model.
        store: The store of K and V; None without one.
    """

    engine: AsyncEngine
    tokenizer: Any
    model: Any
    store: KVStore | None

    def close(self) -> None:
        """End the engine, then the store."""
        self.engine.close()
        if self.store is not None:
            self.store.close()


def load(options: ServeOptions) -> Loaded:
    """Load a model, and make its engine.

    Args:
        options: The options.

    Returns:
        The served model, with its parts.

    Raises:
        ValueError: The folder has no tokenizer or no whole model, or the model cannot be served, with the reason.
    """
    config = engine_config(options)
    tokenizer = load_tokenizer_files(options.model, options.trust_remote_code)
    model = load_model(options)
    engine = Engine.from_model(model, config, tokenizer=tokenizer)
    for name, folder in options.adapter_folders().items():
        engine.load_adapter(name, folder)
    store = open_store(options, engine, model)
    if engine.cache.device.type == "cuda":
        logger.info("preparing the GPU")
        engine.warmup()
    limits = AsyncEngineConfig(max_num_waiting=options.max_num_waiting, drain_timeout=options.drain_timeout)
    return Loaded(AsyncEngine(engine, limits), tokenizer, model, store)


def load_model(options: ServeOptions) -> Any:
    """Return the folder's model on its device, in eval mode."""
    dtype = "auto" if options.dtype == "auto" else getattr(torch, options.dtype)
    plan = split_over_processes() if options.tensor_parallel_size > 1 else {}
    device = None if plan else device_of(options)
    model = load_model_files(options.model, dtype, options.trust_remote_code, **plan)
    return model if device is None else model.to(device)


def split_over_processes() -> dict[str, Any]:
    """Return the arguments by which this version of transformers splits a model over the processes of torchrun."""
    config = getattr(getattr(transformers, "distributed", None), "DistributedConfig", None)
    if config is not None and "tp_plan" in getattr(config, "__dataclass_fields__", {}):
        return {"distributed_config": config(tp_plan="auto")}
    return {"tp_plan": "auto"}


def device_of(options: ServeOptions) -> torch.device:
    """Return the device: with "auto" the first GPU, if there is one. ValueError for one that is not there."""
    has_gpu = torch.cuda.is_available()
    device = torch.device(("cuda" if has_gpu else "cpu") if options.device == "auto" else options.device)
    if device.type == "cuda" and not has_gpu:
        raise ValueError(f"--device must be usable, torch finds no CUDA device for {options.device!r}")
    return device


def engine_config(options: ServeOptions) -> EngineConfig:
    """Return the settings of the engine."""
    return EngineConfig(
        cache_config(options),
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=options.max_model_len,
        same_bits=options.same_bits,
        enable_prefix_caching=options.enable_prefix_caching,
        pin_quota=options.pin_quota,
        eviction=options.eviction,
        sessions=SessionConfig(owner_quota=options.tenant_pin_quota),
        kv_scales="calibrate" if options.kv_cache_dtype.startswith("fp8") else None,
        events=event_config(options),
        generation_config=cast(GenerationDefaults, options.generation_config),
        enforce_eager=options.enforce_eager,
        attention_backend=cast(AttentionBackendName, options.attention_backend),
        tensor_parallel_size=options.tensor_parallel_size,
        num_window_blocks=options.window_blocks,
        kv_cache_memory=None if options.kv_cache_memory is None else parse_size(options.kv_cache_memory),
        states=StateConfig(
            None if options.state_memory is None else parse_size(options.state_memory),
            parse_size(options.host_state_memory),
            options.checkpoint_every or None,
        ),
        explains_requests=True,  # for the page
    )


def event_config(options: ServeOptions) -> EventConfig | None:
    """Return where events are published; None for nowhere."""
    if options.events is None:
        return None
    return EventConfig(options.events, options.events_replay, options.events_topic)


def cache_config(options: ServeOptions) -> CacheConfig:
    """Return the cache: of the blocks that the options name, or of as many as the engine finds."""
    return CacheConfig(
        options.block_size,
        options.num_gpu_blocks or 0,
        options.num_cpu_blocks,
        options.kv_cache_dtype,
        gpu_memory_utilization=options.gpu_memory_utilization,
    )


def open_store(options: ServeOptions, engine: Engine, model: Any) -> KVStore | None:
    """Open the store, if the options name one, and have the engine use it."""
    if not options.stores:
        return None
    config = KVStoreConfig(options.store_chunk_size, options.stores)
    store = KVStore(config, metadata_of(engine.cache, weights_digest(model)))
    engine.use_store(store)
    return store

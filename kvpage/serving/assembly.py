"""What Engine.from_model puts together: the cache of a model, and who gives out its blocks."""

from collections.abc import Sequence
from typing import Literal, TypeGuard

from transformers import PreTrainedModel

from kvpage.blend.segments import MemorySegments, SegmentCache
from kvpage.blend.stored_segments import StoredSegments
from kvpage.blocks.load_or_compute import LoadOrCompute
from kvpage.cache.cache_engine import CacheEngine
from kvpage.checks.tokens import Tokens
from kvpage.layout.config import CacheConfig, DeviceConfig, ModelConfig
from kvpage.layout.kv_scales import KVScales
from kvpage.serving.loop.store_link import BlockStore
from kvpage.serving.model.config_check import check_config
from kvpage.serving.model.kv_calibration import choose_scales
from kvpage.serving.model.latent_check import check_latents, verify_latents
from kvpage.serving.model.paged_check import verify_model, verify_quantized
from kvpage.serving.model.runner import ModelRunner
from kvpage.store import KVStore


def check_servable(model: PreTrainedModel, cache_config: CacheConfig) -> ModelConfig:
    """What the cache has to know of the model. TypeError and ValueError as Engine.from_model, before any work."""
    if not isinstance(cache_config, CacheConfig):
        raise TypeError(f"cache_config must be a CacheConfig, got {type(cache_config).__name__}")
    if cache_config.num_gpu_blocks == 0:
        raise ValueError(
            "num_gpu_blocks must be positive, got 0; CacheConfig.for_memory and CacheConfig.for_device choose it"
        )
    check_config(model)
    keeps_latents = cache_config.backend == "mla"
    if keeps_latents:
        check_latents(model.config.get_text_config(decoder=True), type(model).__name__)
    return ModelConfig.from_hf(model.config, model.dtype, use_mla=keeps_latents)


def verify(runner: ModelRunner, cache_config: CacheConfig, model_config: ModelConfig) -> int | None:
    """Computes a little over blocks of its own: see verify_model, and verify_latents where blocks hold latents."""
    if model_config.use_mla:
        verify_latents(runner, cache_config, model_config)
    return verify_model(runner, cache_config, model_config)


def make_cache(
    runner: ModelRunner,
    cache_config: CacheConfig,
    model_config: ModelConfig,
    kv_scales: Sequence[KVScales] | Literal["calibrate"] | None,
    calibration_tokens: Tokens | None,
) -> CacheEngine:
    """The cache with its scales, which stay; where it quantises, something of the model must be left, or ValueError."""
    scales = choose_scales(runner, cache_config, model_config, kv_scales, calibration_tokens)
    device_config = DeviceConfig(runner.model.device)
    cache = CacheEngine(cache_config, model_config, device_config=device_config, kv_scales=scales)
    if cache.layout.is_quantized:
        verify_quantized(runner, cache_config, model_config, scales)
    return cache


def make_rule(cache_config: CacheConfig, model_config: ModelConfig) -> LoadOrCompute:
    """Whether a block is loaded or computed. Each tier has one of its own: their speeds differ."""
    return LoadOrCompute(CacheEngine.get_cache_block_size(cache_config, model_config), cache_config.block_size)


def default_segments(store: BlockStore | None, cache: CacheEngine, max_bytes: int) -> SegmentCache:
    """In the store, where that can hold rows of the cache as they are, or in host memory."""
    return StoredSegments(store) if _keeps_rows(store, cache) else MemorySegments(max_bytes)


def _keeps_rows(store: BlockStore | None, cache: CacheEngine) -> TypeGuard[KVStore]:
    if not isinstance(store, KVStore) or cache.layout.is_quantized:
        return False
    return store.metadata.kv_dtype in (None, cache.layout.dtype)

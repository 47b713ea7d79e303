"""KVPageCachePool: the blocks of one model, for KVPageCaches that come and go."""

import inspect
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import count

from transformers import PreTrainedModel

from kvpage.blocks.manager import BlockManager
from kvpage.blocks.space import HostPolicy
from kvpage.cache.cache_engine import CacheEngine
from kvpage.checks.interrupts import uninterrupted
from kvpage.checks.values import as_integer
from kvpage.layout.config import CacheConfig, DeviceConfig, ParallelConfig
from kvpage.layout.kv_scales import KVScales
from kvpage.serving.generate.cache_check import verify_pool
from kvpage.serving.generate.cached_rows import CachedRows, TokenRows
from kvpage.serving.generate.kv_page_cache import Held
from kvpage.serving.generate.layer_blocks import LayerBlocks
from kvpage.serving.generate.working_rows import WorkingMemory, WorkingRows
from kvpage.serving.model.check import check_config, unquantized
from kvpage.serving.model.kind import check_model
from kvpage.serving.model.kv_shape import KVShape
from kvpage.serving.model.limits import constant_rope_len, rope_limit, vocab_size
from kvpage.serving.model.window_check import check_windows


class KVPageCachePool:
    """Owns the cache tensors and the block manager; the model stays the caller's. Make it by `from_model`.

    What is cached is cached for the model's weights as they are: adapters go into namespaces of their own, and whoever
    changes weights in place calls `reset_prefix_cache`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        shape: KVShape,
        engine: CacheEngine,
        manager: BlockManager,
        max_working_bytes: int | None = None,
    ) -> None:
        self.model, self.engine, self.manager, self.dtype = model, engine, manager, shape.dtype
        scales = engine.kv_scales or [None] * len(shape.layer_ids)
        layers = zip(shape.layer_ids, engine.gpu_cache, scales, shape.layer_sizes, strict=True)
        self.layers = {
            layer_id: LayerBlocks(cache, engine.layout, scale, shape.is_latent, shape.num_heads, *sizes)
            for layer_id, cache, scale, sizes in layers
        }
        self.working_memory = WorkingMemory(max_working_bytes)
        self.forgotten: deque[Held] = deque()  # of caches that nobody released: filled at any time, even within a call
        self._max_len = constant_rope_len(model)
        self._seq_ids = count()

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
    ) -> "KVPageCachePool":
        """A pool on the model's device, with as many blocks on the device and on the host as the config says.

        Blocks hold what the model hands to its cache. DeepSeek's models hand over latents in newer versions of
        transformers: then the config's backend is "mla". In older ones they hand over what the latents expand to.

        share_parts, host_policy, pin_quota: see BlockManager. kv_scales: see CacheEngine.
        max_working_bytes: how much the caches that are in use may take on the device, beside the blocks, to have K and
            V in one piece: as much again as their rows' blocks, and a quarter or 64 tokens a row. What they lack is
            gathered at each forward, one layer at a time. None: no limit; 0, and blocks that quantise: always gather.

        Raises ValueError, with the reason, for a model whose state is not all in its K and V, or whose K and V do not
        fit into blocks of this layout, or whose sliding window is not in its mask, or one in training mode; for a cache
        without blocks; for scales that the cache takes none of or that leave nothing of the model; for a compiled
        model. TypeError for a config or a model of another type.
        """
        check_model(model)
        if not isinstance(cache_config, CacheConfig):
            raise TypeError(f"cache_config must be a CacheConfig, got {type(cache_config).__name__}")
        if cache_config.num_gpu_blocks == 0:
            raise ValueError("num_gpu_blocks must be positive, got 0")
        if max_working_bytes is not None and as_integer("max_working_bytes", max_working_bytes) < 0:
            raise ValueError(f"max_working_bytes must not be negative, got {max_working_bytes}")
        check_config(model)
        _check_cacheable(model)
        _check_eval(model)
        shape = KVShape.of_model(model)
        _check_backend(model, shape, cache_config)
        check_windows(model)
        small = replace(cache_config, block_size=2, num_gpu_blocks=16, num_cpu_blocks=0)
        verify_pool(cls._make(model, shape, unquantized(small, shape.model_config()), None))
        if cache_config.layout(shape.model_config(), ParallelConfig()).is_quantized:
            verify_pool(cls._make(model, shape, small, kv_scales))
        return cls._make(
            model,
            shape,
            cache_config,
            kv_scales,
            share_parts=share_parts,
            host_policy=host_policy,
            pin_quota=pin_quota,
            max_working_bytes=max_working_bytes,
        )

    @classmethod
    def _make(
        cls,
        model: PreTrainedModel,
        shape: KVShape,
        cache_config: CacheConfig,
        kv_scales: Sequence[KVScales] | None,
        share_parts: bool = True,
        host_policy: HostPolicy | None = None,
        pin_quota: int = 0,
        max_working_bytes: int | None = None,
    ) -> "KVPageCachePool":
        engine = CacheEngine(
            cache_config, shape.model_config(), device_config=DeviceConfig(model.device), kv_scales=kv_scales
        )
        manager = BlockManager(
            cache_config.num_gpu_blocks,
            cache_config.block_size,
            num_host_blocks=cache_config.num_cpu_blocks,
            share_parts=share_parts,
            host_policy=host_policy,
            pin_quota=pin_quota,
        )
        return cls(model, shape, engine, manager, max_working_bytes)

    @uninterrupted
    def reset_prefix_cache(self) -> None:
        """Forgets all that is cached, in both tiers, and ends all pins: for one who has changed weights in place.

        RuntimeError, and nothing is forgotten, while a KVPageCache of the pool is not released: its K and V are of the
        weights before.
        """
        self._release_forgotten()
        self.manager.reset_prefix_cache()

    # --- for KVPageCache ---------------------------------------------------------------------------------------------

    @uninterrupted
    def make_rows(self) -> CachedRows:
        """No rows yet, over the pool's blocks. What was forgotten is released here: not within a forward."""
        self._release_forgotten()
        return CachedRows(self.manager, self.engine, self._seq_ids, self._make_working())

    def _release_forgotten(self) -> None:
        while self.forgotten:
            self.forgotten.popleft().release()

    def _make_working(self) -> WorkingRows | None:
        """None where what is read out of the blocks is not what was written."""
        if not all(layer.keeps(self.dtype) for layer in self.layers.values()):
            return None
        num_slots = self.manager.num_blocks * self.manager.block_size
        bytes_per_token = sum(cache.nbytes for cache in self.engine.gpu_cache) // num_slots
        return WorkingRows(self.layers, bytes_per_token, self.working_memory)

    def check_forward(self, tokens: TokenRows, num_tokens: int) -> None:
        """ValueError unless the model may compute these tokens, at the end of rows of so many."""
        _check_eval(self.model)
        self.check_tokens(tokens)
        self.check_length(num_tokens)

    def check_tokens(self, tokens: TokenRows) -> None:
        """ValueError for ids that the model cannot look up. Negative ones are refused by then."""
        size = vocab_size(self.model)
        if tokens.max() >= size:
            raise ValueError(f"input_ids must be ids in [0, {size}), got {int(tokens.max())}")

    def check_length(self, num_tokens: int) -> None:
        """ValueError for rows so long that their first tokens' K would be another than that of shorter rows."""
        if num_tokens > self._max_len:
            raise ValueError(
                f"rows must have at most {self._max_len} tokens, where the model's rotary embedding changes, "
                f"got {num_tokens}{rope_limit(self.model, num_tokens)}"
            )


def _check_cacheable(model: PreTrainedModel) -> None:
    name = type(model).__name__
    if "past_key_values" not in inspect.signature(model.forward).parameters:
        raise ValueError(f"forward must take past_key_values, that of {name} does not")
    if getattr(model, "_is_stateful", False):
        raise ValueError(f"model must have no state but K and V, {name} has")


def _check_eval(model: PreTrainedModel) -> None:
    if model.training:
        raise ValueError(f"model must be in eval mode, {type(model).__name__} is in training mode")


def _check_backend(model: PreTrainedModel, shape: KVShape, cache_config: CacheConfig) -> None:
    if shape.is_latent != (cache_config.backend == "mla"):
        what = "latents" if shape.is_latent else "K and V of heads"
        raise ValueError(
            f"backend must be 'mla' exactly where a model hands latents to its cache, {type(model).__name__} hands "
            f"{what} to {cache_config.backend!r}"
        )

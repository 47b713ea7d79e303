"""KVPagePool: the blocks behind KVPageCaches, which outlive them: what one `generate` has computed, the next finds."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache, PreTrainedModel

from kvpage.block_manager import BlockManager
from kvpage.cache_engine import CacheEngine
from kvpage.config import CacheConfig, DeviceConfig, ModelConfig
from kvpage.kv_scales import KVScales
from kvpage.serving.model_check import check_config


class RowSizes(NamedTuple):
    """What a model hands to Cache.update for a token and layer: [heads, size] of each of the two tensors."""

    num_heads: int
    key_size: int
    value_size: int


class KVPagePool:
    """The tensors and the block manager of one model's caches. Make it by `from_model`. Not thread-safe."""

    def __init__(self, model: PreTrainedModel, engine: CacheEngine, manager: BlockManager, holds_latents: bool) -> None:
        self.model = model
        self.engine = engine
        self.manager = manager
        self.holds_latents = holds_latents
        self.forgotten: list[Any] = []
        """Sequences of caches that the garbage collector took before they were closed: it comes at any time, also while
        the manager works, so that their blocks are given back when the next cache is made."""

    def release_forgotten(self) -> None:
        while self.forgotten:
            self.manager.release(self.forgotten.pop())

    @classmethod
    def from_model(
        cls,
        model: PreTrainedModel,
        cache_config: CacheConfig,
        *,
        kv_scales: Sequence[KVScales] | None = None,
        enable_prefix_caching: bool = True,
        share_parts: bool = True,
    ) -> "KVPagePool":
        """Blocks on the model's device. One token is computed, to see what the model hands to its cache.

        cache_config: where that is latents (DeepSeek's in newer versions of transformers), they lie in the layout
            `mla`, whatever backend it names. kv_scales: of 8-bit floats, one a layer. The others: see BlockManager.

        ValueError, with the reason, for a model whose state is not all in keys and values, and for a cache without
        blocks.
        """
        if not isinstance(cache_config, CacheConfig):
            raise TypeError(f"cache_config must be a CacheConfig, got {type(cache_config).__name__}")
        if cache_config.num_gpu_blocks == 0:
            raise ValueError("num_gpu_blocks must be positive, got 0")
        check_config(model)
        seen = _Recorder.of(model)
        model_config = ModelConfig.from_hf(model.config, model.dtype)
        sizes = _common_sizes(seen, model_config, type(model).__name__)
        if _is_latent(model.config, sizes):
            model_config = ModelConfig.from_hf(model.config, model.dtype, use_mla=True)
            cache_config = replace(cache_config, backend="mla", kv_layout="NHD")
        _check_sizes(sizes, model_config, type(model).__name__)
        engine = CacheEngine(cache_config, model_config, device_config=DeviceConfig(model.device), kv_scales=kv_scales)
        manager = BlockManager(
            cache_config.num_gpu_blocks,
            cache_config.block_size,
            enable_prefix_caching,
            num_host_blocks=cache_config.num_cpu_blocks,
            share_parts=share_parts,
        )
        return cls(model, engine, manager, model_config.use_mla)


class _Recorder(DynamicCache):
    """Notes what each layer hands over."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, RowSizes] = {}

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any):  # type: ignore[no-untyped-def]
        self.seen[layer_idx] = RowSizes(key_states.shape[1], key_states.shape[3], value_states.shape[3])
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    @classmethod
    def of(cls, model: PreTrainedModel) -> dict[int, RowSizes]:
        cache = cls()
        with torch.no_grad():
            model(
                input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device),
                past_key_values=cache,
                use_cache=True,
            )
        return cache.seen


def _common_sizes(seen: dict[int, RowSizes], model_config: ModelConfig, name: str) -> RowSizes:
    if sorted(seen) != list(range(len(model_config.layer_types))):
        raise ValueError(f"every layer must keep K and V in the cache, of {name} these do: {sorted(seen)}")
    if len(set(seen.values())) != 1:
        raise ValueError(f"all layers must keep K and V of one shape, {name} has {sorted(set(seen.values()))}")
    return seen[0]


def _is_latent(config: Any, sizes: RowSizes) -> bool:
    text = config.get_text_config(decoder=True)
    latent = getattr(text, "kv_lora_rank", None), getattr(text, "qk_rope_head_dim", None)
    return (sizes.num_heads, sizes.key_size, sizes.value_size) == (1, *latent)


def _check_sizes(sizes: RowSizes, model_config: ModelConfig, name: str) -> None:
    """What the config tells must be what the model does."""
    size = sizes.key_size + sizes.value_size if model_config.use_mla else max(sizes.key_size, sizes.value_size)
    if (sizes.num_heads, size) != (model_config.num_kv_heads, model_config.head_size):
        raise ValueError(
            f"the config of {name} tells of {model_config.num_kv_heads} heads of {model_config.head_size}, "
            f"its layers keep {sizes.num_heads} of {size}"
        )

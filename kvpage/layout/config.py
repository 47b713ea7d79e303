"""The configuration: frozen, validated, passed down. Nothing here holds memory."""

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvpage.checks.tensors import parse_device
from kvpage.checks.values import check_at_least
from kvpage.layout.backends import get_backend, stride_order
from kvpage.layout.cache_layout import LAYER_LAYOUTS, CacheLayout

CACHE_DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
}


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """The split of a model over devices: heads over tensor-parallel ranks, layers and blocks over pipeline stages.

    Args:
        tensor_parallel_size: Number of ranks that share each layer's heads.
        pipeline_parallel_size: Number of stages that share the layers and the blocks.
        pipeline_rank: The stage that this process holds, from 0. It decides which layers the engine allocates.

    Raises:
        ValueError: A size is below 1, or `pipeline_rank` is negative or not below `pipeline_parallel_size`.
    """

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    pipeline_rank: int = 0

    def __post_init__(self) -> None:
        check_at_least("tensor_parallel_size", self.tensor_parallel_size, 1)
        check_at_least("pipeline_parallel_size", self.pipeline_parallel_size, 1)
        check_at_least("pipeline_rank", self.pipeline_rank, 0)
        if self.pipeline_rank >= self.pipeline_parallel_size:
            raise ValueError(
                f"pipeline_rank must be under pipeline_parallel_size={self.pipeline_parallel_size}, "
                f"got {self.pipeline_rank}"
            )


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    """The device of the device tier. On a CPU the device tier is host memory.

    Args:
        device: A torch device, or its name. It may be one that this machine lacks.

    Raises:
        ValueError: `device` is neither a CPU nor a CUDA device.
    """

    device: torch.device | str = "cpu"

    def __post_init__(self) -> None:
        object.__setattr__(self, "device", parse_device("device", self.device))

    def free_memory(self) -> int:
        """Return how many bytes can be allocated on the device now."""
        device = torch.device(self.device)
        if device.type == "cuda":
            return torch.cuda.mem_get_info(device)[0]
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a model's K and V, as far as the cache needs it.

    Args:
        head_size: Elements of a head, the larger of K's and V's. For MLA it is that of the latent with its rotary part,
            kv_lora_rank + qk_rope_head_dim.
        num_kv_heads: KV heads over all ranks; 1 for MLA.
        layer_types: One word a layer, from transformers: "full_attention", "sliding_attention", "mamba" and others.
            Only layers that attend over keys and values of their own have a cache.
        dtype: The model's dtype, in which blocks are kept unless CacheConfig names another one.
        use_mla: Whether blocks hold one latent a token, without a value part.

    Raises:
        ValueError: A field is out of range or of another type, or `use_mla` comes with several heads.
    """

    head_size: int
    num_kv_heads: int
    layer_types: tuple[str, ...]
    dtype: torch.dtype = torch.float16
    use_mla: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "layer_types", _layer_words(self.layer_types))
        minimum = 0 if self.is_attention_free else 1
        check_at_least("head_size", self.head_size, minimum)
        check_at_least("num_kv_heads", self.num_kv_heads, minimum)
        if not isinstance(self.dtype, torch.dtype):
            raise ValueError(f"dtype must be a torch.dtype, got {self.dtype!r}")
        if not isinstance(self.use_mla, bool):
            raise ValueError(f"use_mla must be True or False, got {type(self.use_mla).__name__}")
        if self.use_mla and self.num_kv_heads > 1:
            raise ValueError(f"num_kv_heads must be 1 with use_mla, got {self.num_kv_heads}")

    @property
    def is_attention_free(self) -> bool:
        """Whether no layer has a cache."""
        return not any(_is_attention(kind) for kind in self.layer_types)

    def attention_layers(self, parallel_config: ParallelConfig) -> list[int]:
        """Return the indices, in the whole model, of the attention layers that this pipeline stage holds.

        Args:
            parallel_config: The split of the model, with the stage.
        """
        num_layers, num_stages = len(self.layer_types), parallel_config.pipeline_parallel_size
        first = parallel_config.pipeline_rank * num_layers // num_stages
        last = (parallel_config.pipeline_rank + 1) * num_layers // num_stages
        return [layer for layer in range(first, last) if _is_attention(self.layer_types[layer])]

    def with_caches_of(self, layer_ids: Iterable[int]) -> "ModelConfig":
        """Return the same shape, where only these layers have a cache.

        Args:
            layer_ids: Attention layers. The words of others become "elsewhere".
        """
        kept = set(layer_ids)
        words = (kind if layer in kept else "elsewhere" for layer, kind in enumerate(self.layer_types))
        return replace(self, layer_types=tuple(words))

    def num_heads(self, parallel_config: ParallelConfig) -> int:
        """Return the number of KV heads on one rank. With fewer heads than ranks, each rank holds a copy of one.

        Args:
            parallel_config: The split of the model.

        Raises:
            ValueError: Neither of the two numbers divides the other, so that heads would be lost.
        """
        heads, ranks = self.num_kv_heads, parallel_config.tensor_parallel_size
        if max(heads, ranks) % max(min(heads, ranks), 1):
            raise ValueError(
                f"tensor_parallel_size must divide num_kv_heads={heads} or be a multiple of it, got {ranks}"
            )
        return max(1, heads // ranks)

    @classmethod
    def from_hf(cls, config: Any, dtype: torch.dtype | None = None, use_mla: bool = False) -> "ModelConfig":
        """Read a transformers config that describes a text decoder, also one nested in a multimodal config.

        Args:
            config: The config.
            dtype: The model's dtype. Default: the config's, or fp32 if it has none.
            use_mla: Whether to cache DeepSeek's latents. Otherwise the cache holds the expanded heads, which
                transformers' attention functions take.

        Returns:
            The model's config. A model without attention heads gets head_size 0 and num_kv_heads 0.

        Raises:
            ValueError: The config has no number of layers, or `use_mla` is given and it has no kv_lora_rank.
        """
        text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
        layer_types = _layer_types(text)
        dtype = dtype or _dtype(text) or _dtype(config) or torch.float32
        if getattr(text, "num_attention_heads", None) is None:
            return cls(0, 0, layer_types, dtype)
        if use_mla:
            if getattr(text, "kv_lora_rank", None) is None:
                raise ValueError(f"use_mla needs a config with kv_lora_rank, {type(text).__name__} has none")
            return cls(text.kv_lora_rank + text.qk_rope_head_dim, 1, layer_types, dtype, use_mla=True)
        layers = _layers(text)
        return cls(max(map(_head_size, layers)), max(map(_num_kv_heads, layers)), layer_types, dtype)


def _layer_words(layer_types: Any) -> tuple[str, ...]:
    if isinstance(layer_types, Iterable) and not isinstance(layer_types, str):  # a str's letters would be layers
        words = tuple(layer_types)
        if all(isinstance(word, str) for word in words):
            return words
    raise ValueError(f"layer_types must be one str a layer, got {layer_types!r}")


def _layers(text: Any) -> list[Any]:
    """Return one config a layer where layers have attention of different shapes, otherwise the config alone."""
    return list(text.per_layer_config) if getattr(text, "is_heterogeneous", False) else [text]


def _is_attention(kind: str) -> bool:
    return kind == "hybrid" or ("attention" in kind and "linear" not in kind)


def _layer_types(text: Any) -> tuple[str, ...]:
    for name in ("layer_types", "layers_block_type"):
        kinds = getattr(text, name, None)
        if kinds:
            return tuple(kinds)
    if getattr(text, "num_hidden_layers", None) is None:
        raise ValueError(f"config must have num_hidden_layers, {type(text).__name__} has none")
    has_attention = getattr(text, "num_attention_heads", None) is not None
    return ("full_attention" if has_attention else "mamba",) * int(text.num_hidden_layers)


def _dtype(config: Any) -> torch.dtype | None:
    dtype = getattr(config, "dtype", None)
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


def _head_size(text: Any) -> int:
    if getattr(text, "qk_nope_head_dim", None) and getattr(text, "qk_rope_head_dim", None):
        return int(max(text.qk_nope_head_dim + text.qk_rope_head_dim, getattr(text, "v_head_dim", None) or 0))
    heads = text.num_attention_heads
    heads = max(heads) if isinstance(heads, (list, tuple)) else heads
    sizes = [getattr(text, name, None) for name in ("head_dim", "global_head_dim", "v_head_dim")]
    return int(max((size for size in sizes if size), default=None) or text.hidden_size // heads)


def _num_kv_heads(text: Any) -> int:
    names = ("num_key_value_heads", "num_kv_heads", "num_global_key_value_heads", "num_attention_heads")
    if getattr(text, "multi_query", False) and not getattr(text, "new_decoder_architecture", False):
        return 1
    found = [getattr(text, name, None) for name in names]
    own = [count for count in found[:3] if count] or [found[3]]
    return int(max(max(count) if isinstance(count, (list, tuple)) else count for count in own))


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The cache's size and layout.

    Args:
        block_size: Tokens of a block.
        num_gpu_blocks: Blocks of the device tier, over all pipeline stages. An Engine takes 0 for as many as fit.
        num_cpu_blocks: Blocks of the host tier, over all pipeline stages.
        cache_dtype: "auto" (the model's), "fp32", "fp16" or "bf16", or a dtype that quantises. "fp8_e4m3" and
            "fp8_e5m2" have scales for each layer (KVScales). "int8" has a scale for each token and head inside its
            block.
        backend: See CacheLayout.
        kv_layout: See CacheLayout.
        layer_layout: See CacheLayout.
        gpu_memory_utilization: The part of the device's free memory that `for_device` takes, above 0 and at most 1.

    Raises:
        ValueError: A field is out of range, or names something that does not exist.
    """

    block_size: int = 16
    num_gpu_blocks: int = 0
    num_cpu_blocks: int = 0
    cache_dtype: str = "auto"
    backend: str = "flash"
    kv_layout: str = "NHD"
    layer_layout: str = "separate"
    gpu_memory_utilization: float = 0.9

    def __post_init__(self) -> None:
        check_at_least("block_size", self.block_size, 1)
        check_at_least("num_gpu_blocks", self.num_gpu_blocks, 0)
        check_at_least("num_cpu_blocks", self.num_cpu_blocks, 0)
        if self.cache_dtype != "auto" and self.cache_dtype not in CACHE_DTYPES:
            raise ValueError(f"cache_dtype must be auto or one of {', '.join(CACHE_DTYPES)}, got {self.cache_dtype!r}")
        if self.layer_layout not in LAYER_LAYOUTS:
            raise ValueError(f"layer_layout must be one of {', '.join(LAYER_LAYOUTS)}, got {self.layer_layout!r}")
        if not isinstance(self.gpu_memory_utilization, (int, float)) or not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization!r}")
        stride_order(get_backend(self.backend), self.kv_layout)

    def layout(self, model_config: ModelConfig, parallel_config: ParallelConfig) -> CacheLayout:
        """Return the layout of each attention layer's cache on one rank.

        Args:
            model_config: The model's shape. Latents (use_mla) need the backend "mla".
            parallel_config: The split of the model.

        Raises:
            ValueError: Only one of the backend and the model is for latents, or the heads cannot be split over the
                ranks.
        """
        if model_config.use_mla and self.backend != "mla":
            raise ValueError(f"backend must be 'mla' for a ModelConfig with use_mla=True, got {self.backend!r}")
        if self.backend == "mla" and not model_config.use_mla:
            raise ValueError(
                "backend must not be 'mla', which keeps latents, for a ModelConfig with use_mla=False, got 'mla'"
            )
        return CacheLayout(
            block_size=self.block_size,
            num_kv_heads=model_config.num_heads(parallel_config),
            head_size=model_config.head_size,
            dtype=CACHE_DTYPES.get(self.cache_dtype, model_config.dtype),
            backend=self.backend,
            kv_layout=self.kv_layout,
            layer_layout=self.layer_layout,
        )

    @classmethod
    def for_memory(
        cls,
        gpu_bytes: int,
        model_config: ModelConfig,
        parallel_config: ParallelConfig | None = None,
        cpu_bytes: int = 0,
        **fields: Any,
    ) -> "CacheConfig":
        """Make a config with as many blocks as fit into the given memory of one rank.

        Args:
            gpu_bytes: Bytes of the device tier.
            model_config: The model's shape.
            parallel_config: The split of the model; None for a single process.
            cpu_bytes: Bytes of the host tier.
            **fields: Other fields of CacheConfig.

        Returns:
            The config. Its numbers of blocks are over all pipeline stages.

        Raises:
            TypeError: A config is of another type.
            ValueError: A number of bytes is negative, the model has no attention layers, or a field is out of range.
        """
        check_at_least("gpu_bytes", gpu_bytes, 0)
        check_at_least("cpu_bytes", cpu_bytes, 0)
        cache_config = cls(**fields)
        check_configs(cache_config, model_config, parallel_config)
        parallel_config = parallel_config or ParallelConfig()
        block_bytes = cache_block_bytes(cache_config, model_config, parallel_config)
        stages = parallel_config.pipeline_parallel_size
        if block_bytes == 0:
            raise ValueError("for_memory needs a model with attention layers, this one has none")
        return cls(
            **fields,
            num_gpu_blocks=gpu_bytes // block_bytes * stages,
            num_cpu_blocks=cpu_bytes // block_bytes * stages,
        )

    @classmethod
    def for_device(
        cls,
        device_config: DeviceConfig,
        model_config: ModelConfig,
        parallel_config: ParallelConfig | None = None,
        **fields: Any,
    ) -> "CacheConfig":
        """Make a config with blocks in the device's free memory, as `for_memory` does. Load the model first.

        Args:
            device_config: The device. The blocks take the part gpu_memory_utilization of its free memory.
            model_config: The model's shape.
            parallel_config: The split of the model; None for a single process.
            **fields: Other fields of CacheConfig, and cpu_bytes.

        Returns:
            The config. Its numbers of blocks are over all pipeline stages.

        Raises:
            TypeError: As in `for_memory`.
            ValueError: As in `for_memory`.
        """
        gpu_bytes = int(device_config.free_memory() * cls(**_only_config(fields)).gpu_memory_utilization)
        return cls.for_memory(gpu_bytes, model_config, parallel_config, **fields)


def _only_config(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name != "cpu_bytes"}


def cache_block_bytes(cache: CacheConfig, model: ModelConfig, parallel: ParallelConfig) -> int:
    """Return the bytes of one block in all attention layers of one rank, K and V together."""
    num_layers = len(model.attention_layers(parallel))
    if num_layers == 0:
        return 0
    return num_layers * cache.layout(model, parallel).block_bytes


def check_configs(
    cache_config: CacheConfig,
    model_config: ModelConfig,
    parallel_config: ParallelConfig | None = None,
    device_config: DeviceConfig | None = None,
) -> None:
    """Raise TypeError unless each config is of its class. The last two may be None."""
    for name, config, kind in (
        ("cache_config", cache_config, CacheConfig),
        ("model_config", model_config, ModelConfig),
        ("parallel_config", parallel_config, ParallelConfig),
        ("device_config", device_config, DeviceConfig),
    ):
        if not isinstance(config, kind) and not (config is None and kind in (ParallelConfig, DeviceConfig)):
            raise TypeError(f"{name} must be a {kind.__name__}, got {type(config).__name__}")

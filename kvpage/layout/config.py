"""The configuration: frozen, validated, passed down. Nothing here holds memory."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvpage.checks.tensors import parse_device
from kvpage.checks.values import check_at_least
from kvpage.layout.backends import get_backend, stride_order
from kvpage.layout.cache_layout import LAYER_LAYOUTS, CacheLayout
from kvpage.layout.model_config import ModelConfig, ParallelConfig

__all__ = [
    "CACHE_DTYPES",
    "CacheConfig",
    "DeviceConfig",
    "ModelConfig",
    "ParallelConfig",
    "cache_block_bytes",
    "check_configs",
]

CACHE_DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
}


def available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Return how many bytes of host memory can be allocated now.

    Pages of files that were read, such as a model's weights, count: the system gives them back.

    Args:
        meminfo: Where Linux tells; without MemAvailable in it, pages of files do not count.
    """
    lines = meminfo.read_text().splitlines() if meminfo.is_file() else []
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


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
        return available_bytes()


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
        """Return the layout of the first cache on one rank. Other layers may have other heads and sizes: see `layouts`.

        Args:
            model_config: The model's shape. Latents (use_mla) need the backend "mla".
            parallel_config: The split of the model.

        Raises:
            ValueError: As of `layouts`.
        """
        layers = model_config.attention_layers(parallel_config)
        return self._layout_of(model_config, parallel_config, layers[0] if layers else 0)

    def layouts(self, model_config: ModelConfig, parallel_config: ParallelConfig) -> list[CacheLayout]:
        """Return the layout of the cache of each layer that has one, on one rank.

        Where V has another size than K, the backend's `uneven` keeps them; a backend without it pads both.

        Args:
            model_config: The model's shape. Latents (use_mla) need the backend "mla".
            parallel_config: The split of the model.

        Raises:
            ValueError: Only one of the backend and the model is for latents, or the heads cannot be split over the
                ranks.
        """
        layers = model_config.attention_layers(parallel_config)
        return [self._layout_of(model_config, parallel_config, layer) for layer in layers]

    def _layout_of(self, model_config: ModelConfig, parallel_config: ParallelConfig, layer: int) -> CacheLayout:
        if model_config.use_mla and self.backend != "mla":
            raise ValueError(f"backend must be 'mla' for a ModelConfig with use_mla=True, got {self.backend!r}")
        if self.backend == "mla" and not model_config.use_mla:
            raise ValueError(
                "backend must not be 'mla', which keeps latents, for a ModelConfig with use_mla=False, got 'mla'"
            )
        shape = model_config.shape_of(layer)
        uneven = getattr(get_backend(self.backend), "uneven", None)
        is_joint = shape.value_size is not None and uneven is not None
        return CacheLayout(
            block_size=self.block_size,
            num_kv_heads=shape.heads_of_rank(parallel_config.tensor_parallel_size),
            head_size=shape.head_size if is_joint else shape.largest,
            dtype=CACHE_DTYPES.get(self.cache_dtype, model_config.dtype),
            backend=uneven if is_joint and uneven is not None else self.backend,
            kv_layout=self.kv_layout,
            layer_layout=self.layer_layout,
            value_size=shape.value_size if is_joint else None,
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
    return sum(layout.block_bytes for layout in cache.layouts(model, parallel))


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

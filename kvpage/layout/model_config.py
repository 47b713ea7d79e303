"""ModelConfig: layers, heads and sizes of a model's K and V; ParallelConfig: how they are split over devices."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvpage.checks.values import check_at_least
from kvpage.layout.hf_shapes import dtype_of, layer_shapes, layer_words, shared_layers
from kvpage.layout.layer_shape import LayerShape


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
class ModelConfig:
    """The shape of a model's K and V, as far as the cache needs it.

    Args:
        head_size: Elements of a head, the largest of any K and V. For MLA it is that of the latent with its rotary
            part, kv_lora_rank + qk_rope_head_dim.
        num_kv_heads: KV heads of the layer that has most, over all ranks; 1 for MLA.
        layer_types: One word a layer, from transformers: "full_attention", "sliding_attention", "mamba" and others.
            Only layers that attend over keys and values of their own have a cache.
        dtype: The model's dtype, in which blocks are kept unless CacheConfig names another one.
        use_mla: Whether blocks hold one latent a token, without a value part.
        layer_shapes: The shape of each layer of `layer_types`, None for a layer without a cache. By default K and V of
            all layers have num_kv_heads and head_size. `of_shapes` finds these two.
        shared_layers: Pairs of a layer that attends over the K and V of another, and that one. The first has no cache.

    Raises:
        ValueError: A field is out of range or of another type, or two do not fit together.
    """

    head_size: int
    num_kv_heads: int
    layer_types: tuple[str, ...]
    dtype: torch.dtype = torch.float16
    use_mla: bool = False
    layer_shapes: tuple[LayerShape | None, ...] | None = None
    shared_layers: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "layer_types", _layer_words(self.layer_types))
        object.__setattr__(self, "shared_layers", tuple((layer, source) for layer, source in self.shared_layers))
        minimum = 0 if self.is_attention_free else 1
        check_at_least("head_size", self.head_size, minimum)
        check_at_least("num_kv_heads", self.num_kv_heads, minimum)
        if not isinstance(self.dtype, torch.dtype):
            raise ValueError(f"dtype must be a torch.dtype, got {self.dtype!r}")
        if not isinstance(self.use_mla, bool):
            raise ValueError(f"use_mla must be True or False, got {type(self.use_mla).__name__}")
        if self.use_mla and self.num_kv_heads > 1:
            raise ValueError(f"num_kv_heads must be 1 with use_mla, got {self.num_kv_heads}")
        self._check_shared_layers()
        if self.layer_shapes is not None:
            object.__setattr__(self, "layer_shapes", tuple(self.layer_shapes))
            self._check_layer_shapes(self.layer_shapes)

    def _check_shared_layers(self) -> None:
        sources = dict(self.shared_layers)
        for layer, source in self.shared_layers:
            if not 0 <= source < layer < len(self.layer_types) or source in sources:
                raise ValueError(
                    f"shared_layers must name a layer and an earlier one with a cache, got {layer, source}"
                )

    def _check_layer_shapes(self, shapes: tuple[LayerShape | None, ...]) -> None:
        if len(shapes) != len(self.layer_types):
            raise ValueError(f"layer_shapes must be one of each of {len(self.layer_types)} layers, got {len(shapes)}")
        if self.use_mla:
            raise ValueError("layer_shapes must be None with use_mla: latents of all layers are alike")
        for layer in self.attention_layers(ParallelConfig()):
            if not isinstance(shapes[layer], LayerShape):
                raise ValueError(f"layer_shapes must have a LayerShape of layer {layer}, got {shapes[layer]!r}")
        cached_shapes = [shape for shape in shapes if shape is not None]
        largest = (
            max((shape.largest for shape in cached_shapes), default=0),
            max((shape.num_kv_heads for shape in cached_shapes), default=0),
        )
        if largest != (self.head_size, self.num_kv_heads):
            raise ValueError(
                f"head_size and num_kv_heads must be the largest of layer_shapes, {largest}, got "
                f"{(self.head_size, self.num_kv_heads)}"
            )

    @classmethod
    def of_shapes(
        cls,
        layer_shapes: Sequence[LayerShape | None],
        layer_types: Sequence[str],
        dtype: torch.dtype,
        shared_layers: Iterable[tuple[int, int]] = (),
    ) -> "ModelConfig":
        """Return the config of layers with shapes of their own, or of one shape where all are alike.

        Args:
            layer_shapes: As the field.
            layer_types: As the field.
            dtype: As the field.
            shared_layers: As the field.

        Raises:
            ValueError: As of the constructor.
        """
        cached_shapes = [shape for shape in layer_shapes if shape is not None]
        if not cached_shapes:
            return cls(0, 0, tuple(layer_types), dtype)
        sizes = max(shape.largest for shape in cached_shapes), max(shape.num_kv_heads for shape in cached_shapes)
        is_uniform = set(cached_shapes) == {LayerShape(sizes[1], sizes[0])}
        shapes = None if is_uniform else tuple(layer_shapes)
        return cls(*sizes, tuple(layer_types), dtype, layer_shapes=shapes, shared_layers=tuple(shared_layers))

    def shape_of(self, layer: int) -> LayerShape:
        """Return the shape of a layer's K and V.

        Args:
            layer: Its index in the whole model. It has a cache.
        """
        shape = None if self.layer_shapes is None else self.layer_shapes[layer]
        return LayerShape(self.num_kv_heads, self.head_size) if shape is None else shape

    @property
    def is_attention_free(self) -> bool:
        """Whether no layer has a cache."""
        return not any(_is_attention(kind) for kind in self.layer_types)

    @property
    def is_uniform(self) -> bool:
        """Whether K and V of all layers have one shape, and each layer that attends has its own."""
        return self.layer_shapes is None and not self.shared_layers

    def attention_layers(self, parallel_config: ParallelConfig) -> list[int]:
        """Return the indices, in the whole model, of the layers with a cache that this pipeline stage holds.

        Args:
            parallel_config: The split of the model, with the stage.
        """
        num_layers, num_stages = len(self.layer_types), parallel_config.pipeline_parallel_size
        first = parallel_config.pipeline_rank * num_layers // num_stages
        last = (parallel_config.pipeline_rank + 1) * num_layers // num_stages
        shared = dict(self.shared_layers)
        return [layer for layer in range(first, last) if _is_attention(self.layer_types[layer]) and layer not in shared]

    def with_caches_of(self, layer_ids: Iterable[int]) -> "ModelConfig":
        """Return the same shape, where only these layers have a cache.

        Args:
            layer_ids: Layers with a cache. Layers that share their caches stay; the words of others become "elsewhere".
        """
        owners = set(layer_ids)
        shared = tuple(pair for pair in self.shared_layers if pair[1] in owners)
        cached = owners | {layer for layer, _ in shared}
        words = (kind if layer in cached else "elsewhere" for layer, kind in enumerate(self.layer_types))
        return replace(self, layer_types=tuple(words), shared_layers=shared)

    def num_heads(self, parallel_config: ParallelConfig) -> int:
        """Return the KV heads on one rank, of the layer that has most: see `LayerShape.heads_of_rank`.

        Args:
            parallel_config: The split of the model.

        Raises:
            ValueError: The heads cannot be split over the ranks.
        """
        return LayerShape(self.num_kv_heads, self.head_size).heads_of_rank(parallel_config.tensor_parallel_size)

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
        layer_types = layer_words(text)
        dtype = dtype or dtype_of(text) or dtype_of(config) or torch.float32
        if getattr(text, "num_attention_heads", None) is None:
            return cls(0, 0, layer_types, dtype)
        if use_mla:
            if getattr(text, "kv_lora_rank", None) is None:
                raise ValueError(f"use_mla needs a config with kv_lora_rank, {type(text).__name__} has none")
            return cls(text.kv_lora_rank + text.qk_rope_head_dim, 1, layer_types, dtype, use_mla=True)
        return cls.of_shapes(layer_shapes(text, layer_types), layer_types, dtype, shared_layers(text, layer_types))


def _layer_words(layer_types: Any) -> tuple[str, ...]:
    if isinstance(layer_types, Iterable) and not isinstance(layer_types, str):  # a str's letters would be layers
        words = tuple(layer_types)
        if all(isinstance(word, str) for word in words):
            return words
    raise ValueError(f"layer_types must be one str a layer, got {layer_types!r}")


def _is_attention(kind: str) -> bool:
    return kind == "hybrid" or ("attention" in kind and "linear" not in kind)

"""KVShape: the layers, heads and sizes of the K and V that a model hands to its cache, by computing two tokens.

The config does not always say it. Some layers have no K and V of their own. DeepSeek's models hand over latents or
expanded K and V, by the version of transformers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from kvpage.layout.config import ModelConfig
from kvpage.layout.layer_shape import LayerShape
from kvpage.serving.model.hf_cache.argument import checked_cache_argument
from kvpage.serving.model.hf_cache.seen_cache import SeenCache


@dataclass(frozen=True, slots=True)
class KVShape:
    """The shape of a model's K and V.

    layer_ids: the layers that have a cache, ascending.
    layer_shapes: heads and sizes of each of layer_ids.
    is_latent: whether K is a latent for all heads, and V its rotary part (MLA).
    """

    layer_ids: tuple[int, ...]
    layer_shapes: tuple[LayerShape, ...]
    dtype: torch.dtype
    is_latent: bool

    @classmethod
    def of_model(cls, model: PreTrainedModel) -> "KVShape":
        """Compute two tokens. Raises ValueError, with the reason, if K and V do not fit into blocks."""
        seen = SeenCache()
        with torch.no_grad():
            tokens = torch.ones(1, 2, dtype=torch.long, device=model.device)
            model(input_ids=tokens, use_cache=True, **{checked_cache_argument(model): seen})
        return cls.of_rows(model, seen.rows)

    @classmethod
    def of_rows(cls, model: PreTrainedModel, rows: Sequence[tuple[int, torch.Tensor, torch.Tensor]]) -> "KVShape":
        """Return the shape of what the layers of a model have written, for two tokens. Raises as `of_model` does.

        rows: (layer, K, V) of each write, in any order. Layers without any have states, or nothing.
        """
        name = type(model).__name__
        if not rows:
            raise ValueError(f"model must write its K and V into its cache, {name} does not")
        layer_ids = [layer for layer, _, _ in rows]
        if len(set(layer_ids)) != len(layer_ids):
            raise ValueError(f"each layer must write to its cache once, those of {name} wrote in the order {layer_ids}")
        tensors = [tensor for _, key, value in rows for tensor in (key, value)]
        for noun, kinds in (
            ("shape [rows, heads, tokens, size]", {(x.dim(), x.shape[0], x.shape[2]) for x in tensors} | {(4, 1, 2)}),
            ("dtype", {x.dtype for x in tensors}),
            ("device", {x.device for x in tensors}),
        ):
            if len(kinds) > 1:
                raise ValueError(
                    f"K and V of all layers must have one {noun}, those of {name} have {sorted(map(str, kinds))}"
                )
        shapes = tuple(shape_of_rows(name, *row) for row in sorted(rows, key=lambda row: row[0]))
        is_latent = {(shape.num_kv_heads, shape.head_size, shape.value_size) for shape in shapes} == {
            (1, *_latent_sizes(model))
        }
        return cls(tuple(sorted(layer_ids)), shapes, tensors[0].dtype, is_latent)

    def model_config(self) -> ModelConfig:
        """Return a config with one layer of blocks for each layer that has a cache, in their order."""
        layer_types = ("full_attention",) * len(self.layer_ids)
        if self.is_latent:
            first = self.layer_shapes[0]
            return ModelConfig(first.head_size + (first.value_size or 0), 1, layer_types, self.dtype, use_mla=True)
        return ModelConfig.of_shapes(self.layer_shapes, layer_types, self.dtype)


def shape_of_rows(name: str, layer: int, key: torch.Tensor, value: torch.Tensor) -> LayerShape:
    """Return the shape of a layer's K and V, [rows, heads, ..., size]. ValueError where they have unlike heads."""
    if key.shape[1] != value.shape[1]:
        raise ValueError(
            f"K and V must have as many heads, those of layer {layer} of {name} have {key.shape[1]} and "
            f"{value.shape[1]}"
        )
    return LayerShape(key.shape[1], key.shape[-1], value.shape[-1])


def _latent_sizes(model: PreTrainedModel) -> tuple[int | None, int | None]:
    text = model.config.get_text_config(decoder=True)
    return getattr(text, "kv_lora_rank", None), getattr(text, "qk_rope_head_dim", None)

"""KVShape: the layers, heads and sizes of the K and V that a model hands to its cache, by computing two tokens.

The config does not always say it. Some layers have no K and V of their own. DeepSeek's models hand over latents or
expanded K and V, by the version of transformers.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from kvpage.layout.config import ModelConfig


@dataclass(frozen=True, slots=True)
class KVShape:
    """The shape of a model's K and V.

    layer_ids: the layers that have a cache, ascending.
    num_heads: the number of KV heads. key_size, value_size: the largest of any layer.
    layer_sizes: the sizes of K and V, for each of layer_ids.
    is_latent: whether K is a latent for all heads, and V its rotary part (MLA).
    """

    layer_ids: tuple[int, ...]
    num_heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype
    is_latent: bool
    layer_sizes: tuple[tuple[int, int], ...]

    @classmethod
    def of_model(cls, model: PreTrainedModel) -> "KVShape":
        """Compute two tokens. Raises ValueError, with the reason, if K and V do not fit into blocks of one shape."""
        name, seen = type(model).__name__, _Seen()
        with torch.no_grad():
            model(
                input_ids=torch.ones(1, 2, dtype=torch.long, device=model.device), past_key_values=seen, use_cache=True
            )
        if not seen.calls:
            raise ValueError(f"model must write its K and V into past_key_values, {name} does not")
        layer_ids = [layer for layer, _, _ in seen.calls]
        if len(set(layer_ids)) != len(layer_ids):
            raise ValueError(f"each layer must write to its cache once, those of {name} wrote in the order {layer_ids}")
        tensors = [tensor for _, key, value in seen.calls for tensor in (key, value)]
        for noun, kinds in (
            ("shape [rows, heads, tokens, size]", {(x.dim(), x.shape[0], x.shape[2]) for x in tensors} | {(4, 1, 2)}),
            ("number of KV heads", {x.shape[1] for x in tensors}),
            ("dtype", {x.dtype for x in tensors}),
            ("device", {x.device for x in tensors}),
        ):
            if len(kinds) > 1:
                raise ValueError(
                    f"K and V of all layers must have one {noun}, those of {name} have {sorted(map(str, kinds))}"
                )
        sizes = {(key.shape[3], value.shape[3]) for _, key, value in seen.calls}
        num_heads = tensors[0].shape[1]
        return cls(
            tuple(sorted(layer_ids)),
            num_heads,
            max(key for key, _ in sizes),
            max(value for _, value in sizes),
            tensors[0].dtype,
            num_heads == 1 and sizes == {_latent_sizes(model)},
            tuple((key.shape[3], value.shape[3]) for _, key, value in sorted(seen.calls, key=lambda call: call[0])),
        )

    def model_config(self) -> ModelConfig:
        """Return a config with one layer of blocks for each layer that has a cache, in their order."""
        layer_types = ("full_attention",) * len(self.layer_ids)
        if self.is_latent:
            return ModelConfig(self.key_size + self.value_size, 1, layer_types, self.dtype, use_mla=True)
        return ModelConfig(max(self.key_size, self.value_size), self.num_heads, layer_types, self.dtype)


def _latent_sizes(model: PreTrainedModel) -> tuple[int | None, int | None]:
    text = model.config.get_text_config(decoder=True)
    return getattr(text, "kv_lora_rank", None), getattr(text, "qk_rope_head_dim", None)


class _Seen(DynamicCache):
    """Keep the K and V of each `update`, and return them: enough for one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[int, torch.Tensor, torch.Tensor]] = []

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls.append((layer_idx, key_states, value_states))
        return key_states, value_states

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        raise ValueError(f"layers must cache K and V alone, layer {layer_idx} has an indexer's keys too")

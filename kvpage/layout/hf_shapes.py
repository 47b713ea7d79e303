"""Read layers, heads and sizes out of a transformers config of a text decoder."""

from collections.abc import Sequence
from typing import Any

import torch

from kvpage.layout.layer_shape import LayerShape

DOUBLED = ("mimo_v2_flash",)
"""Model types whose layers with windows have twice the KV heads that their configs tell."""


def layer_words(text: Any) -> tuple[str, ...]:
    """Return one word a layer. ValueError for a config without a number of layers."""
    for name in ("layer_types", "layers_block_type"):
        kinds = getattr(text, name, None)
        if kinds:
            return tuple(kinds)
    if getattr(text, "num_hidden_layers", None) is None:
        raise ValueError(f"config must have num_hidden_layers, {type(text).__name__} has none")
    has_attention = getattr(text, "num_attention_heads", None) is not None
    return ("full_attention" if has_attention else "mamba",) * int(text.num_hidden_layers)


def dtype_of(config: Any) -> torch.dtype | None:
    """Return the config's dtype; None if it has none."""
    dtype = getattr(config, "dtype", None)
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


def layer_shapes(text: Any, words: Sequence[str]) -> list[LayerShape]:
    """Return the shape of each layer's K and V, as far as the config tells; of layers without attention any."""
    if getattr(text, "is_heterogeneous", False):
        return [_shape(layer, False) for layer in text.per_layer_config]
    if getattr(text, "model_type", None) in DOUBLED:
        of_window = _shape(text, False, 2)
        return [of_window if word == "sliding_attention" else _shape(text, False) for word in words]
    if getattr(text, "global_head_dim", None):
        return [_shape(text, word == "full_attention") for word in words]
    return [_shape(text, False)] * len(words)


def shared_layers(text: Any, words: Sequence[str]) -> list[tuple[int, int]]:
    """Return the last layers that share the K and V of the last one before them of their kind, each with that one."""
    first = len(words) - (getattr(text, "num_kv_shared_layers", None) or 0)
    sources = {word: layer for layer, word in enumerate(words[:first])}
    return [(layer, sources[words[layer]]) for layer in range(first, len(words)) if words[layer] in sources]


def _shape(text: Any, is_global: bool, factor: int = 1) -> LayerShape:
    """is_global: whether the numbers of layers that attend over everything count, where a config has such.

    factor: of the number of KV heads.
    """
    size = _key_size(text)
    if is_global:
        size = int(text.global_head_dim)
        if getattr(text, "attention_k_eq_v", False) and getattr(text, "num_global_key_value_heads", None):
            return LayerShape(int(text.num_global_key_value_heads), size)
    return LayerShape(factor * _num_kv_heads(text), size, getattr(text, "v_head_dim", None) or None)


def _key_size(text: Any) -> int:
    if getattr(text, "qk_nope_head_dim", None) and getattr(text, "qk_rope_head_dim", None):
        return int(text.qk_nope_head_dim + text.qk_rope_head_dim)
    heads = text.num_attention_heads
    heads = max(heads) if isinstance(heads, (list, tuple)) else heads
    return int(getattr(text, "head_dim", None) or text.hidden_size // heads)


def _num_kv_heads(text: Any) -> int:
    if getattr(text, "multi_query", False) and not getattr(text, "new_decoder_architecture", False):
        return 1
    names = ("num_key_value_heads", "num_kv_heads", "num_attention_heads")
    count = next(count for name in names if (count := getattr(text, name, None)))
    return int(max(count) if isinstance(count, (list, tuple)) else count)

"""Random models whose layers keep states, one of each kind of state, in sizes that a CPU serves."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as tf
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCAB = 4096


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model: of its rows, and its layers, every fourth of which attends."""

    hidden: int
    layers: int


SHAPE = Shape(512, 8)


def _types(shape: Shape, state: str) -> list[str]:
    return ["full_attention" if layer % 4 == 3 else state for layer in range(shape.layers)]


def _mamba2(shape: Shape) -> dict[str, Any]:
    return {"mamba_n_heads": shape.hidden // 32, "mamba_d_head": 64, "mamba_d_state": 64}


def _delta_net(shape: Shape) -> dict[str, Any]:
    heads = {"linear_num_key_heads": shape.hidden // 128, "linear_num_value_heads": shape.hidden // 64}
    sizes = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "head_dim": 64}
    return {**heads, **sizes, "layer_types": _types(shape, "linear_attention")}


EXPERTS = {"num_experts_per_tok": 2}
FAMILIES: dict[str, tuple[str, Callable[[Shape], dict[str, Any]]]] = {
    "bamba": ("Mamba-2", lambda shape: {**_mamba2(shape), "attn_layer_indices": list(range(3, shape.layers, 4))}),
    "qwen3_5_text": ("gated delta net", _delta_net),
    "lfm2": ("short convolution", lambda shape: {"layer_types": _types(shape, "conv")}),
    "jamba": ("Mamba", lambda shape: {
        "attn_layer_period": 4, "attn_layer_offset": 3, "num_experts": 1, "num_experts_per_tok": 1,
    }),
    "mamba": ("Mamba, no attention", lambda shape: {}),
    "mamba2": ("Mamba-2, no attention", lambda shape: {
        "num_heads": shape.hidden // 32, "head_dim": 64, "state_size": 64, "n_groups": 1,
    }),
    "falcon_h1": ("Mamba-2, beside attention in each layer", lambda shape: {
        **_mamba2(shape), "mamba_d_ssm": 2 * shape.hidden, "mamba_n_groups": 1,
    }),
    "granitemoehybrid": ("Mamba-2, experts", lambda shape: {
        **_mamba2(shape), **EXPERTS, "num_local_experts": 4, "shared_intermediate_size": shape.hidden,
        "intermediate_size": shape.hidden, "layer_types": _types(shape, "mamba"),
    }),
    "qwen3_next": ("gated delta net, experts", lambda shape: {
        **_delta_net(shape), **EXPERTS, "num_experts": 4, "decoder_sparse_step": 1,
        "moe_intermediate_size": shape.hidden, "shared_expert_intermediate_size": shape.hidden,
    }),
    "recurrent_gemma": ("RG-LRU", lambda shape: {
        "lru_width": shape.hidden, "attention_window_size": 2048,
        "block_types": ["recurrent", "recurrent", "recurrent", "attention"],
    }),
}  # fmt: skip
"""By type: what its states are, and its fields for a shape."""


def make_family(kind: str, shape: Shape) -> tf.PreTrainedModel:
    """A random model in fp32 and eval mode, with grouped queries and gated MLPs."""
    num_heads = max(shape.hidden // 64, 2)
    fields: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": shape.hidden, "intermediate_size": 3 * shape.hidden,
        "num_hidden_layers": shape.layers, "num_attention_heads": num_heads, "num_key_value_heads": num_heads // 2,
        "max_position_embeddings": 8192, "initializer_range": 0.05, "pad_token_id": 0, "bos_token_id": None,
        "eos_token_id": None, "tie_word_embeddings": False,
    }  # fmt: skip
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**{**fields, **FAMILIES[kind][1](shape)})
    return tf.AutoModelForCausalLM.from_config(config).float().eval()

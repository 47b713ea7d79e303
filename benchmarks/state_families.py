"""Random models whose layers keep states, one of each kind of state, in sizes that a CPU serves."""

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


def _layer_types(num_layers: int, state: str) -> list[str]:
    return ["full_attention" if layer % 4 == 3 else state for layer in range(num_layers)]


def _mamba2(shape: Shape) -> dict[str, Any]:
    attends = [layer for layer in range(shape.layers) if layer % 4 == 3]
    return {"attn_layer_indices": attends, "mamba_n_heads": shape.hidden // 32, "mamba_d_head": 64, "mamba_d_state": 64}


def _delta_net(shape: Shape) -> dict[str, Any]:
    heads = {"linear_num_key_heads": shape.hidden // 128, "linear_num_value_heads": shape.hidden // 64}
    sizes = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "head_dim": 64}
    return {**heads, **sizes, "layer_types": _layer_types(shape.layers, "linear_attention")}


def _short_convolution(shape: Shape) -> dict[str, Any]:
    return {"layer_types": _layer_types(shape.layers, "conv")}


def _mamba(shape: Shape) -> dict[str, Any]:
    return {"attn_layer_period": 4, "attn_layer_offset": 3, "num_experts": 1, "num_experts_per_tok": 1}


def _mamba_alone(shape: Shape) -> dict[str, Any]:
    return {}


def _mamba2_alone(shape: Shape) -> dict[str, Any]:
    return {"num_heads": shape.hidden // 32, "head_dim": 64, "state_size": 64, "n_groups": 1}


def _mamba2_beside(shape: Shape) -> dict[str, Any]:
    sizes = {"mamba_d_ssm": 2 * shape.hidden, "mamba_d_head": 64, "mamba_d_state": 64}
    return {"mamba_n_heads": shape.hidden // 32, "mamba_n_groups": 1, **sizes}


def _mamba2_experts(shape: Shape) -> dict[str, Any]:
    sizes = {"mamba_n_heads": shape.hidden // 32, "mamba_d_head": 64, "mamba_d_state": 64}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": shape.hidden}
    return {**sizes, **experts, "intermediate_size": shape.hidden, "layer_types": _layer_types(shape.layers, "mamba")}


def _delta_net_experts(shape: Shape) -> dict[str, Any]:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1}
    sizes = {"moe_intermediate_size": shape.hidden, "shared_expert_intermediate_size": shape.hidden}
    return {**_delta_net(shape), **experts, **sizes}


def _recurrence(shape: Shape) -> dict[str, Any]:
    blocks = ["recurrent", "recurrent", "recurrent", "attention"]
    return {"lru_width": shape.hidden, "attention_window_size": 2048, "block_types": blocks}


FAMILIES = {
    "bamba": ("Mamba-2", _mamba2),
    "qwen3_5_text": ("gated delta net", _delta_net),
    "lfm2": ("short convolution", _short_convolution),
    "jamba": ("Mamba", _mamba),
    "mamba": ("Mamba, no attention", _mamba_alone),
    "mamba2": ("Mamba-2, no attention", _mamba2_alone),
    "falcon_h1": ("Mamba-2, beside attention in each layer", _mamba2_beside),
    "granitemoehybrid": ("Mamba-2, experts", _mamba2_experts),
    "qwen3_next": ("gated delta net, experts", _delta_net_experts),
    "recurrent_gemma": ("RG-LRU", _recurrence),
}
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

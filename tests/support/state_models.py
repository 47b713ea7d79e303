"""Tiny models whose layers keep states, one of each family, with random weights."""

import torch
import transformers as tf
from support.family_configs import small_fields
from support.models import spread_sinks
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

DELTA = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
FIELDS: dict[str, dict[str, object]] = {
    "qwen3_next": {**DELTA, "decoder_sparse_step": 1},
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": DELTA,
    "nemotron_h": {},
    "falcon_h1": {},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "lfm2_moe": {},
    "lfm3": {},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4, "mamba_d_conv": 4},
    "bamba": {"attn_layer_indices": [1]},
    "zamba": {"attention_hidden_size": 64, "attention_head_dim": 16, "mamba_dt_rank": 4},
    "zamba2": {},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    "mamba": {},
    "mamba2": {},
    "falcon_mamba": {},
    "bailing_hybrid": {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    "olmo_hybrid": {},
    "zaya": {},
    "recurrent_gemma": {"num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 6},
    "inkling_text": {},
    "inkling2_text": {},
}
"""By type: fields beside the small sizes of all families."""

REFUSED = ("inkling_text", "inkling2_text")
SERVED = tuple(kind for kind in FIELDS if kind not in REFUSED)


def make_state_model(kind: str, weight_std: float = 0.1) -> tf.PreTrainedModel:
    """A tiny random model in fp32 and eval mode."""
    config_class = CONFIG_MAPPING[kind]
    config = config_class(**{**small_fields(config_class, kind), **FIELDS[kind]})
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=weight_std)
    spread_sinks(model)
    return model

"""Configs of tiny models, of any decoder type of transformers: released ones scaled down.

Most have one set of small sizes. Sizes of heads keep the proportions of the type's default config, which is that of a
released model. Where released models of a type have layers of unlike shapes, each of these is a config of its own.
"""

import inspect
from typing import Any

import transformers as tf
from support.models import COMMON, WINDOW
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

MAX_PARAMETERS = 20_000_000

SMALL: dict[str, Any] = {
    **COMMON,
    **dict.fromkeys(("n_embd", "d_model", "word_embed_proj_dim", "embed_dim", "embedding_size", "attention_hidden_size",
                     "emb_dim", "input_embedding_size", "dim_model", "cross_hidden_size", "hidden_size_global",
                     "vision_embed_dim", "mm_embed_dim"), 32),
    **dict.fromkeys(("n_layer", "num_layers", "n_layers", "decoder_layers", "encoder_layers", "num_decoder_layers",
                     "num_encoder_layers", "depth"), 3),
    **dict.fromkeys(("n_head", "num_heads", "n_heads", "decoder_attention_heads", "encoder_attention_heads",
                     "num_encoder_attention_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("ffn_dim", "d_ff", "n_inner", "decoder_ffn_dim", "encoder_ffn_dim", "ffn_hidden_size",
                     "intermediate_size_mlp", "dim_ff", "shared_intermediate_size", "feed_forward_size"), 48),
    **dict.fromkeys(("n_positions", "n_ctx", "max_sequence_length", "max_seq_len", "seq_length",
                     "max_target_positions"), 256),
    **dict.fromkeys(("head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "index_head_dim",
                     "mamba_d_state", "state_size", "mamba_d_head", "mamba_head_dim", "linear_key_head_dim",
                     "linear_value_head_dim", "linear_head_dim", "hidden_size_per_layer_input", "mamba_n_heads"), 8),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token"), 2),
    **dict.fromkeys(("moe_intermediate_size", "q_lora_rank", "kv_lora_rank", "shared_expert_intermediate_size",
                     "mamba_num_heads", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("n_group", "topk_group", "mamba_n_groups", "n_groups", "mamba_ngroups"), 1),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "index_n_heads", "linear_num_heads"), 4),
    "rotary_dim": 4,
    "init_std": 0.3,
    "sliding_window": WINDOW,
    "vocab_size_per_layer_input": COMMON["vocab_size"],
    "is_decoder": True,
    "tie_word_embeddings": False,
    "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
"""By the names of fields, whatever the type: those that a config has are set."""

TWO_KINDS = ["sliding_attention", "full_attention"]
SHARING = {"num_hidden_layers": 4, "layer_types": TWO_KINDS * 2, "num_kv_shared_layers": 2}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
ATTENDS_IN_THE_MIDDLE = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
DELTA = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}

SPECIAL: dict[str, dict[str, Any]] = {
    "bailing_hybrid": ATTENDS_IN_THE_MIDDLE,
    "bamba": {"attn_layer_indices": [1]},
    "blt": {"encoder_hash_byte_group_vocab": 50},
    "cohere_compass_text": {"rope_parameters": {kind: ROPE for kind in TWO_KINDS}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots1": {"n_shared_experts": 1},
    "dots3_note_text": {
        "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 16, "swa_kv_lora_rank": 16,
        "swa_head_dim": 16, "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 8,
    },
    "dots3_note_vision_encoder": {"pyramid_num_routed": [-1, 2, 4], "adapter_in_dim": 32, "adapter_out_dim": 32},
    "dots3_note_audio_encoder": {"adapter_input_size": 32, "adapter_out_dim": 32},
    "gemma3n_text": SHARING,
    "gemma4_assistant": {
        "text_config": {
            **COMMON, "model_type": "gemma4_text", "head_dim": 8, "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0, "num_kv_shared_layers": 3, "layer_types": ["full_attention"] * 3,
        },
    },
    "gpt_neo": {"attention_types": [[["global", "local", "global"], 1]], "window_size": WINDOW},
    "granitemoehybrid": ATTENDS_IN_THE_MIDDLE,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4, "mamba_d_conv": 4},
    "kimi_linear": ATTENDS_IN_THE_MIDDLE,
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "longcat_flash": {"zero_expert_num": 2},
    "mamba2": {"num_heads": 8},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"]},
    "mimo_v2_flash": {"num_attention_heads": 8, "num_key_value_heads": 1},
    "moshi": {"audio_vocab_size": 16},
    "falcon_h1": {"mamba_d_ssm": 64},
    "qwen3_5_moe_text": DELTA,
    "qwen3_5_text": DELTA,
    "qwen3_next": {**DELTA, "decoder_sparse_step": 1},
    "recurrent_gemma": {"lru_width": 32, "attention_window_size": WINDOW},
    "reformer": {
        "axial_pos_shape": (16, 16), "axial_pos_embds_dim": (16, 16), "attention_head_size": 8, "num_buckets": 4,
        "attn_layers": ["local", "lsh", "local"], "local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4,
    },
    "roc_bert": {
        "pronunciation_embed_dim": 8, "pronunciation_vocab_size": 20, "shape_embed_dim": 8, "shape_vocab_size": 20,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 6, "attn_layer_period": 3, "attn_layer_offset": 1, "num_key_value_heads": 4,
        "attention_hidden_size": 64, "attention_head_dim": 16, "mamba_dt_rank": 4,
    },
    "zamba2": {"layers_block_type": ["mamba", "hybrid", "mamba"], "n_mamba_heads": 8, "num_key_value_heads": 4},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}  # fmt: skip
"""By type, also of a part: fields that replace or follow the small ones. Those of parts go into these."""

HEADS_OF_GEMMA4 = {
    "num_attention_heads": 8, "head_dim": 8, "global_head_dim": 16, "num_hidden_layers": 6,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"], "attention_k_eq_v": True,
    "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0,
}  # fmt: skip
GEMMA4 = (
    {**SHARING, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16},
    {**HEADS_OF_GEMMA4, "num_key_value_heads": 4, "num_global_key_value_heads": 1},
    {
        **HEADS_OF_GEMMA4, "num_key_value_heads": 4, "num_global_key_value_heads": 1, "enable_moe_block": True,
        "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16,
    },
)  # fmt: skip
"""E2B and E4B; 31B; 26B-A4B."""

RELEASED: dict[str, tuple[dict[str, Any], ...]] = {"gemma4_text": GEMMA4, "gemma4_unified_text": GEMMA4[:2]}
"""By type the fields of several released models, scaled down. A type with such parts has the first."""

HEAD_SIZES = "head_dim", "global_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"

NOT_FROM_AUTO = {"musicgen": "MusicgenDecoderConfig", "musicgen_melody": "MusicgenMelodyDecoderConfig"}
"""Types whose class of decoders takes another config than AutoModelForCausalLM gives it."""


def decoder_types() -> dict[str, str]:
    """The name of the class by each type that this transformers knows as a decoder."""
    return dict(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()))


def num_released(kind: str) -> int:
    """How many configs there are of this type."""
    return len(RELEASED.get(kind, ({},)))


def make_config(kind: str, released: int = 0) -> tf.PretrainedConfig:
    """The config of a tiny model of this type. released: the number of the released model."""
    config_class = getattr(tf, NOT_FROM_AUTO[kind]) if kind in NOT_FROM_AUTO else CONFIG_MAPPING[kind]
    return config_class(**small_fields(config_class, kind, released))


def small_fields(config_class: type[tf.PretrainedConfig], kind: str, released: int = 0) -> dict[str, Any]:
    """Small sizes for the fields that the class has, its parts' among them."""
    names = field_names(config_class)
    fields = {name: value for name, value in SMALL.items() if name in names or name.endswith("_token_id")}
    fields.update(head_sizes(config_class, fields))
    if "kv_lora_rank" in names:
        fields["num_key_value_heads"] = SMALL["num_attention_heads"]
    for name, part in default_parts(config_class).items():
        fields[name] = {**small_fields(type(part), part.model_type), "model_type": part.model_type}
    special = {**SPECIAL.get(kind, {}), **RELEASED.get(kind, ({},))[released]}
    for name, value in special.items():
        fields[name] = {**fields[name], **value} if isinstance(fields.get(name), dict) else value
    return fields


def head_sizes(config_class: type[tf.PretrainedConfig], fields: dict[str, Any]) -> dict[str, int]:
    """Return the sizes of heads among the fields in the proportions of the default config, the smallest as it is."""
    default = vars(default_config(config_class))
    sizes = {name: default.get(name) for name in HEAD_SIZES if isinstance(fields.get(name), int)}
    if len(sizes) < 2 or not all(isinstance(size, int) and size > 0 for size in sizes.values()):
        return {}
    smallest = min(sizes.values())
    return {name: fields[name] * size // smallest for name, size in sizes.items()}


def default_config(config_class: type[tf.PretrainedConfig]) -> tf.PretrainedConfig:
    """Return the class's default config, an empty one where it has none."""
    try:
        return config_class()
    except Exception:  # some types must be given parts
        return tf.PretrainedConfig()


def default_parts(config_class: type[tf.PretrainedConfig]) -> dict[str, tf.PretrainedConfig]:
    """The configs inside of the class's default one, by their fields. None where there is no default."""
    names = getattr(config_class, "sub_configs", None) or {}
    try:
        default = config_class() if names else None
    except Exception:  # some versions of transformers raise where parts must be given
        return {}
    parts = {name: getattr(default, name, None) for name in names}
    return {name: part for name, part in parts.items() if isinstance(part, tf.PretrainedConfig)}


def field_names(config_class: type[tf.PretrainedConfig]) -> set[str]:
    """Return the arguments that a config of the class takes."""
    names: set[str] = set()
    for parent in config_class.__mro__:
        names |= set(getattr(parent, "__annotations__", {}))
        if "__init__" in parent.__dict__:
            names |= set(inspect.signature(parent.__init__).parameters)
    return names

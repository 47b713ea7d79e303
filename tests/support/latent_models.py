"""Tiny decoders of every family that makes K and V of heads out of latents (MLA), and that this transformers has."""

import torch
import transformers as tf
from support.models import COMMON, spread_sinks

MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 20,  # more than a head has, and no size of anything else
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
}
EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
LONGCAT = {  # each of its layers attends twice
    "num_layers": 2,
    "num_hidden_layers": 4,
    "head_dim": 4,
    "ffn_hidden_size": 48,
    "expert_ffn_hidden_size": 16,
    "n_routed_experts": 8,
    "moe_topk": 2,
    "zero_expert_num": 2,
}
YARN = {  # lengths beyond 16 turn queries' size up
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
FAMILIES = {
    "deepseek_v2": ("DeepseekV2Config", {**EXPERTS, "topk_method": "group_limited_greedy"}),
    "deepseek_v3": ("DeepseekV3Config", EXPERTS),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", EXPERTS),
    "longcat_flash": ("LongcatFlashConfig", LONGCAT),
    "mistral4": ("Mistral4Config", {**EXPERTS, "rope_parameters": YARN}),
    "minicpm3": ("MiniCPM3Config", {"scale_emb": 1, "dim_model_base": 32, "tie_word_embeddings": False}),
    "youtu": ("YoutuConfig", {}),
    "axk1": ("AXK1Config", EXPERTS),
}
KINDS = [kind for kind, (name, _) in FAMILIES.items() if hasattr(tf, name)]


def make_latent_model(kind: str, **fields: object) -> tf.PreTrainedModel:
    """A seeded model in fp32 and eval mode, with its own eager attention. `fields`: of its config."""
    name, own = FAMILIES[kind]
    config = getattr(tf, name)(**{**COMMON, **MLA, **own, **fields})
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(tf, name.replace("Config", "ForCausalLM"))(config).float().eval()
    spread_sinks(model)
    return model

"""Tiny decoders with random weights, made from configs, and the tokens of `model.generate` for prompts.

The initial weights are larger than transformers' own, so that greedy tokens vary; no end-of-sequence token ends a
sequence early unless a test sets one.
"""

from collections.abc import Callable

import torch
import transformers as tf

VOCAB = 199
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
WINDOW = 6  # shorter than most prompts, and no multiple of the tests' block size


def _config(name: str, **fields: object) -> tf.PretrainedConfig:
    return getattr(tf, name)(**{**COMMON, **fields})


CONFIGS: dict[str, Callable[[], tf.PretrainedConfig]] = {
    "llama": lambda: _config("LlamaConfig"),
    "qwen2": lambda: _config("Qwen2Config"),
    "qwen3": lambda: _config("Qwen3Config", head_dim=16),
    "mistral": lambda: _config("MistralConfig", sliding_window=WINDOW, head_dim=8),
    "gemma2": lambda: _config(
        "Gemma2Config", tie_word_embeddings=False, sliding_window=WINDOW, head_dim=16, query_pre_attn_scalar=16,
        attn_logit_softcapping=2.0, final_logit_softcapping=20.0,
    ),
    "gemma3": lambda: _config(
        "Gemma3TextConfig", tie_word_embeddings=False, sliding_window=WINDOW, head_dim=16, query_pre_attn_scalar=16,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "gpt2": lambda: tf.GPT2Config(
        vocab_size=VOCAB, n_positions=256, n_embd=32, n_layer=3, n_head=4, initializer_range=0.3, pad_token_id=0,
        bos_token_id=1, eos_token_id=None,
    ),
    "gpt_oss": lambda: _config(
        "GptOssConfig", sliding_window=WINDOW, head_dim=8, num_local_experts=4, num_experts_per_tok=2,
        max_position_embeddings=256, rope_parameters={
            "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128, "rope_theta": 10000.0,
        },
    ),
    "phi3": lambda: _config("Phi3Config", sliding_window=WINDOW),
    "deepseek_v3": lambda: _config(
        "DeepseekV3Config", num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8,
        qk_rope_head_dim=8, v_head_dim=12, n_routed_experts=8, num_experts_per_tok=2, n_group=2, topk_group=1,
        moe_intermediate_size=16, first_k_dense_replace=1,
    ),
}  # fmt: skip


def make_model(kind: str, **fields: object) -> tf.PreTrainedModel:
    """A seeded model in fp32 and eval mode, with its own eager attention as the reference needs it."""
    config = CONFIGS[kind]()
    config._attn_implementation = "eager"
    for name, value in fields.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    spread_sinks(model)
    return model


def spread_sinks(model: tf.PreTrainedModel) -> None:
    """Set sinks that matter: those of the initialisation may be anything, also zero."""
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter, std=2.0)


def generate_each(model: tf.PreTrainedModel, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """The greedy tokens of `model.generate`, one prompt at a time."""
    outputs = []
    for prompt in prompts:
        row = torch.tensor([prompt])
        tokens = model.generate(
            row, attention_mask=torch.ones_like(row), max_new_tokens=max_tokens, do_sample=False, pad_token_id=0
        )
        outputs.append(tokens[0, len(prompt) :].tolist())
    return outputs


def generate_padded(model: tf.PreTrainedModel, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """The greedy tokens of `model.generate` for all prompts in one left-padded batch."""
    width = max(map(len, prompts))
    rows = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    tokens = model.generate(rows, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False, pad_token_id=0)
    return tokens[:, width:].tolist()


def make_prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    """Random prompts of these lengths, without the padding token."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, VOCAB, (length,), generator=generator).tolist() for length in lengths]

"""Small random models whose heads vLLM's CPU attention knows: 32 numbers at least."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig

SIZES: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 2048, "initializer_range": 0.2,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip


def make_llama(path: Path, seed: int = 0, **sizes: Any) -> Path:
    """Write a Llama of two layers, or of other sizes."""
    return _write(path, LlamaConfig(**{"num_hidden_layers": 2, **SIZES, **sizes}), seed)


def make_gemma(path: Path) -> Path:
    """Write a Gemma 3 of six layers: five see 64 tokens, one sees all. vLLM has a group of blocks for each kind."""
    config = Gemma3TextConfig(num_hidden_layers=6, sliding_window=64, query_pre_attn_scalar=32, **SIZES)
    return _write(path, config, 0)


def _write(path: Path, config: Any, seed: int) -> Path:
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).eval().float().save_pretrained(path)
    return path

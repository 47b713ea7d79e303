"""A folder with a small random Llama and a tokenizer, as servers and routers take it."""

from pathlib import Path

import torch
from support.tokenizers_made import byte_level
from transformers import LlamaConfig, LlamaForCausalLM

TEMPLATE = (
    "{% for message in messages %}<s>{{ message.role }}: {{ message.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


def make_model_folder(path: Path, max_model_len: int = 4096) -> Path:
    """Write the model, its tokenizer and its chat template into a new folder."""
    torch.manual_seed(0)
    tokenizer = byte_level()
    tokenizer.chat_template = TEMPLATE
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=max_model_len, initializer_range=0.2,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).eval().save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path

"""A folder with a random model and a tokenizer, as `kvpage serve` and vLLM's server load them."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from kvpage.benchmarks.serving_workloads import DTYPES, VOCAB, Shape, make_model

TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"


def save_model(folder: Path, shape: Shape, dtype: str, **fields: Any) -> None:
    """Write a Llama with random weights into the folder, with a byte-level tokenizer of its vocabulary.

    fields: of its configuration.
    """
    logging.disable_progress_bar()
    model = make_model(shape, DTYPES[dtype], VOCAB, **fields)
    model.generation_config.eos_token_id = fields.get("eos_token_id")
    model.save_pretrained(folder)
    make_tokenizer(VOCAB).save_pretrained(folder)
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": TEMPLATE}))


def make_tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each byte, and words for all other ids."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*letters, *(f"Ġw{index}" for index in range(len(letters), vocab))]
    made = Tokenizer(models.BPE({name: index for index, name in enumerate(names)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made)


def load_model(folder: str, dtype: torch.dtype) -> Any:
    """Return the model of a folder, in a process of its own."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").eval()

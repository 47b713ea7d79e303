"""save_model: a random model with a tokenizer and a chat template, in a folder that `kvpage serve` takes.

Its answers are random words. They come as fast, and are cached as well, as answers of a trained model of its size: each
word is one token, so a chat's next turn has the very tokens of the last answer.

    " the cache of"  ─►  " the" " cache" " of"      a word with its space is a token
    "Grüße"          ─►  "G" "r" "\xc3" "\xbc" ...   other text is bytes, which the model never writes
"""

from collections import Counter
from pathlib import Path
from typing import Any

import torch

from kvpage.tools.demo import project_text, small_llama

VOCAB_SIZE = 2048
MAX_MODEL_LEN = 2048
END, ROLES = "<|end|>", ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
SPACE = "\u0120"  # as a byte-level vocabulary spells it
NEVER = 1e4  # how far below all others the scores of tokens lie that are no words, times the scale of the last norm
TEMPLATE = (
    "{% for tool in tools or [] %}<|system|>{{ tool.function | tojson }}" + END + "{% endfor %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}" + END + "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def save_model(folder: Path, seed: int = 0) -> None:
    """Write the model.

    Args:
        folder: Where to; it is made.
        seed: Of the weights.

    Raises:
        ValueError: The folder holds a model already.
    """
    if (folder / "config.json").exists():
        raise ValueError(f"--save must name a new folder, {folder} holds a model")
    tokenizer = make_tokenizer()
    model = small_llama(seed, VOCAB_SIZE, MAX_MODEL_LEN)
    others = [token_id for name, token_id in tokenizer.get_vocab().items() if not _is_word(name)]
    write_only_words(model, others)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


def make_tokenizer() -> Any:
    """Return a tokenizer whose tokens are bytes, and the most common words of the project's own text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False)
    counts = Counter(piece for piece, _ in pieces.pre_tokenize_str(project_text()))
    common = sorted(filter(_is_word, counts), key=lambda word: (-counts[word], word))
    names = list(dict.fromkeys([END, *ROLES, *sorted(pre_tokenizers.ByteLevel.alphabet()), *common]))[:VOCAB_SIZE]
    vocab = {name: token_id for token_id, name in enumerate(names)}
    made = Tokenizer(models.BPE(vocab, [], ignore_merges=True))
    made.pre_tokenizer, made.decoder = pieces, decoders.ByteLevel()
    make: Any = PreTrainedTokenizerFast  # not annotated there
    return make(
        tokenizer_object=made,
        eos_token=END,
        pad_token=END,
        additional_special_tokens=list(ROLES),
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def write_only_words(model: Any, others: list[int]) -> None:
    """Have a Llama never choose some tokens: a feature of every position, which no layer changes, counts against them.

    others: the tokens.
    """
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 1.0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
        model.model.norm.weight[0] = NEVER
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[others, 0] = -1.0


def _is_word(name: str) -> bool:
    """Return whether a token is a space and letters: any row of such words is read as the same tokens."""
    return name.startswith(SPACE) and name[1:].isascii() and name[1:].isalpha()

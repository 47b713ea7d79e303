"""save_model: a random model with a tokenizer and a chat template, in a folder that `kvpage serve` takes.

Its answers are random words. They come as fast, and are cached as well, as those of a trained model of its size.
"""

from pathlib import Path
from typing import Any

from kvpage.tools.demo import project_text, small_llama

VOCAB_SIZE = 2048
MAX_MODEL_LEN = 2048
END, ROLES = "<|end|>", ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}" + END + "{% endfor %}"
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
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    if (folder / "config.json").exists():
        raise ValueError(f"--save must name a new folder, {folder} holds a model")
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END, *ROLES],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([project_text()], trainer)
    make: Any = PreTrainedTokenizerFast  # not annotated there
    tokenizer = make(tokenizer_object=made, eos_token=END, pad_token=END, chat_template=TEMPLATE)
    model = small_llama(seed, VOCAB_SIZE, MAX_MODEL_LEN)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)

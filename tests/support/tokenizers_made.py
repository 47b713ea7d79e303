"""Small tokenizers of each common kind, made here: nothing is downloaded."""

import functools

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEXT = [
    "the quick brown fox jumps over the lazy dog. ", "It's what they don't say, isn't it? ",
    '{"name": "Ann", "age": 31, "tags": ["a", "b"]}\n', "Grüße aus Köln, naïve café — 日本語 😀👍🏽 ",
    "def f(x):\n    return x + 1\n", "0123456789 true false null -1.5e3 [] {} : , ",
] * 4  # fmt: skip
SPECIAL = ["<s>", "</s>", "<pad>"]


@functools.cache
def byte_level(vocab_size: int = 400) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE, as GPT-2 and Llama 3 have: characters are spread over tokens of single bytes."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(TEXT, trainer)
    return _as_fast(made)


@functools.cache
def metaspace() -> PreTrainedTokenizerFast:
    """Return a BPE with spaces as in sentencepiece and a token for each byte, as Llama 2, Mistral and Gemma have."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained.train_from_iterator(TEXT[:3], trainers.BpeTrainer(vocab_size=150, show_progress=False))
    names = [*SPECIAL, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    names += sorted(token for token in trained.get_vocab() if token not in names)
    names += ["▁▁", "▁▁▁▁", "é", "日"]
    vocab = {name: index for index, name in enumerate(dict.fromkeys(names))}
    made = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = trained.normalizer
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens(SPECIAL)
    return _as_fast(made, unk_token="<unk>")


@functools.cache
def word_piece(cleans: bool = True) -> PreTrainedTokenizerFast:
    """Return a WordPiece, as BERT has, whose decoder takes away spaces before punctuation."""
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece(cleanup=cleans)
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]", *SPECIAL], show_progress=False)
    made.train_from_iterator(TEXT, trainer)
    return _as_fast(made, unk_token="[UNK]", clean_up_tokenization_spaces=cleans)


def _as_fast(made: Tokenizer, **fields: object) -> PreTrainedTokenizerFast:
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>", **fields
    )
    fast.add_tokens([AddedToken("<tool>", special=False), AddedToken("<|end|>", special=True)])
    return fast

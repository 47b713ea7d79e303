"""SpaceCleanup: clean_up_tokenization of transformers, over text that comes in pieces.

pieces   "do"   " n"   "'t"   " stop"   " ."
text     "do"   ""     "n't"  " stop"   "."      a piece waits while it may be the begin of " n't"
"""

from transformers import PreTrainedTokenizerBase

REPLACED = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")
BEGINS = tuple({text[:length] for text in REPLACED for length in range(1, len(text))})
OPT_OUT_OF_V5 = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"


def cleans_spaces(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the tokenizer's `decode` cleans spaces up."""
    if not getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return False
    backend = getattr(tokenizer, "backend_tokenizer", None)
    is_bpe = backend is not None and type(backend.model).__name__ == "BPE"
    return not (is_bpe and getattr(tokenizer, OPT_OUT_OF_V5, True) is False)


class SpaceCleanup:
    """Text without the spaces before punctuation. All pieces together are the cleaned text."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, piece: str) -> str:
        """Take the next piece; return the text that no later piece can change."""
        text = self._held + piece
        begin = len(text)
        while begin > 0 and (cut := _cut(text[:begin])) < begin:
            begin = cut
        self._held = text[begin:]
        return cleaned(text[:begin])

    def flush(self) -> str:
        """End the text; return the rest."""
        rest, self._held = cleaned(self._held), ""
        return rest


def _cut(text: str) -> int:
    """Return the length of the text without a begin of a replaced part at its end."""
    return len(text) - max((len(begin) for begin in BEGINS if text.endswith(begin)), default=0)


def cleaned(text: str) -> str:
    """Return the text as clean_up_tokenization leaves it."""
    for part in REPLACED:
        text = text.replace(part, part.strip())
    return text

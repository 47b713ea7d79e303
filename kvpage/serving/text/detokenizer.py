"""Detokenizer: turn the tokens of one answer into text as they come.

    tokens    [ "Gr" | "\xc3" | "\xbc" | "<0xC3>" "<0xBC>" | "!" ]
    text        "Gr"    ""      "ü"      ""       ""         "ü!"

A token is decoded together with those of the piece before it, because a decoder may look at its neighbours. The text
is handed out as far as no later token can change it.
"""

import copy
from collections.abc import Callable, Collection, Sequence

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from kvpage.checks.values import check_flag

REPLACED = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")
BEGINS = tuple({text[:length] for text in REPLACED for length in range(1, len(text))})
OPT_OUT_OF_V5 = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"


BROKEN = "\ufffd"
MAX_UNSETTLED, NUM_KEPT = 32, 8
"""Tokens without a whole character, after which only the last few are kept: a character has four bytes at most."""


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


class Detokenizer:
    """The text of one answer, as far as it is known. All pieces together are the tokenizer's `decode` of all tokens.

    A character that is spread over several tokens comes whole. A run of byte tokens (`<0xC3>`) comes with the first
    token after it, because an invalid byte changes how its whole run is decoded.

    Args:
        tokenizer: A tokenizer of transformers. It is not changed.
        skip_special_tokens: Leave out special tokens, such as the end of the sequence.
        shown_ids: Special tokens that have a text nevertheless.

    Attributes:
        skipped_ids: The tokens that are left out.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        skip_special_tokens: bool = True,
        shown_ids: Collection[int] = (),
    ) -> None:
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            raise TypeError(f"tokenizer must be a tokenizer of transformers, got {type(tokenizer).__name__}")
        check_flag("skip_special_tokens", skip_special_tokens)
        self._tokenizer, self._decoded = tokenizer, decoder_of(tokenizer, skip_special_tokens and not shown_ids)
        self.skipped_ids = special_ids(tokenizer) - set(shown_ids) if skip_special_tokens else frozenset[int]()
        self._limit = id_limit(tokenizer)
        self._cleanup = SpaceCleanup() if cleans_spaces(tokenizer) else None
        self._begin()

    def _begin(self) -> None:
        self._window: list[int] = []  # the tokens that the next ones are decoded with
        self._num_settled = 0  # of these, the tokens whose text was handed out at the last whole character
        self._num_given = 0  # characters of the window's text that were handed out
        self._is_in_bytes = False  # whether the last token is a single byte

    def another(self) -> "Detokenizer":
        """Return one for another answer, without asking the tokenizer for its special tokens again.

        Returns:
            A detokenizer with the same rules, at the beginning of its text.
        """
        other = copy.copy(self)
        other._cleanup = None if self._cleanup is None else SpaceCleanup()
        other._begin()
        return other

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens.

        Args:
            token_ids: The ids, in order. Ids that the tokenizer lacks have no text.

        Returns:
            The text that is settled by now, after what earlier calls returned. It may be empty.
        """
        num_before = len(self._window)
        for token in token_ids:
            self._take(token)
        if len(self._window) == num_before or self._is_in_bytes:
            return ""
        text = self._decoded(self._window)
        num_whole = len(text) - text.endswith(BROKEN)
        piece = text[self._num_given : num_whole]
        self._num_given += len(piece)
        is_whole = (
            num_whole == len(text) and piece != ""
        )  # some decoders leave out the bytes of a character that lacks any
        if is_whole or len(self._window) > MAX_UNSETTLED:
            self._settle(is_whole, len(text) - num_whole)
        return piece if self._cleanup is None else self._cleanup.push(piece)

    def flush(self) -> str:
        """End the text, and begin an empty one.

        Returns:
            The rest of the text. A character that lacks bytes is a replacement character, as in `decode`.
        """
        rest = self._decoded(self._window)[self._num_given :] if self._window else ""
        self._begin()
        return rest if self._cleanup is None else self._cleanup.push(rest) + self._cleanup.flush()

    def _take(self, token: int) -> None:
        if token in self.skipped_ids or token >= self._limit:
            return
        name = self._tokenizer.convert_ids_to_tokens(int(token))
        if name is not None:
            self._window.append(int(token))
            self._is_in_bytes = isinstance(name, str) and is_byte(name)

    def _settle(self, is_whole: bool, num_broken: int) -> None:
        """Keep the tokens since the last whole character as the neighbours of the next ones.

        num_broken: characters at the end of the window's text that later tokens may change.
        """
        self._window = self._window[self._num_settled :] if is_whole else self._window[-NUM_KEPT:]
        self._num_settled = len(self._window)
        self._num_given = len(self._decoded(self._window)) - num_broken


def decoder_of(tokenizer: PreTrainedTokenizerBase, skips_special: bool) -> Callable[[list[int]], str]:
    """Return the tokenizer's `decode` for one list of ids, without the cleanup of spaces.

    Where transformers adds nothing to the tokenizer's backend, the backend is asked: a stream decodes twice a token.
    """
    if (
        isinstance(tokenizer, PreTrainedTokenizerFast)
        and getattr(tokenizer.decode, "__func__", None) is PreTrainedTokenizerBase.decode
        and getattr(tokenizer._decode, "__func__", None) is PreTrainedTokenizerFast._decode
    ):
        backend = tokenizer.backend_tokenizer

        def decoded_at_once(token_ids: list[int]) -> str:
            text: str = backend.decode(token_ids, skip_special_tokens=skips_special)
            return text

        return decoded_at_once

    def decoded(token_ids: list[int]) -> str:
        text = tokenizer.decode(token_ids, skip_special_tokens=skips_special, clean_up_tokenization_spaces=False)
        assert isinstance(text, str), "one list of tokens has one text"
        return text

    return decoded


def is_byte(token: str) -> bool:
    """Return whether a token stands for a single byte, as `<0x0A>` does."""
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def id_limit(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return one more than the greatest id that `decode` takes: a tokenizer in Python may raise for others."""
    if tokenizer.is_fast:
        return 2**31  # others have no text
    limit: int = max([len(tokenizer), *(token + 1 for token in getattr(tokenizer, "added_tokens_decoder", {}))])
    return limit


def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the ids that `decode` leaves out with skip_special_tokens."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    flagged = {token for token, content in added.items() if content.special}
    return frozenset(flagged.union(tokenizer.all_special_ids))

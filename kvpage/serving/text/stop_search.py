"""StopSearch: find the first stop string in the text of one answer, across the borders of its tokens.

    stop = "</p>"     tokens   "a" | " <" | "/" | "p>b"
                      text     a <                         found in the last one; text: "a "

Only the end of the text is searched again with each token: as many characters as a stop string may have begun.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from kvpage.serving.text.detokenizer import Detokenizer

TokenArray = npt.NDArray[np.int32]


class _Tail:
    """The last characters of a text, in which a stop string may have begun."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._num_kept = stops, max(map(len, stops)) - 1
        self._text, self._offsets = "", list[int]()

    def find(self, piece: str, offsets: Iterable[int]) -> tuple[int, int, str] | None:
        """Take a piece; return the stop string that ends first in it, of those the longest, after its begin and end.

        offsets: where each character of the piece is. The end is where its last character is, and one.
        """
        self._text += piece
        self._offsets += offsets
        matches = [(at + len(stop), at, stop) for stop in self._stops if (at := self._text.find(stop)) >= 0]
        span = None
        if matches:
            end, at, stop = min(matches)
            span = self._offsets[at], self._offsets[end - 1] + 1, stop
        num_gone = max(len(self._text) - self._num_kept, 0)
        self._text, self._offsets = self._text[num_gone:], self._offsets[num_gone:]
        return span


class StopSearch:
    """The text of one answer up to the first of its stop strings.

    The text has no special tokens. It is searched with their own text (`<|im_end|>`), and without.

    stops: at least one. min_tokens: a stop string that ends within the first min_tokens tokens does not count.
    keeps_stop: whether the text ends after the stop string. detokenizer: of the tokenizer, which skips special tokens;
    others of it are used. None makes one.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stops: Sequence[str],
        min_tokens: int = 0,
        keeps_stop: bool = False,
        detokenizer: Detokenizer | None = None,
    ) -> None:
        self._tokenizer, self._stops, self._min_tokens = tokenizer, stops, min_tokens
        self._keeps_stop = keeps_stop
        self._detokenizer = detokenizer or Detokenizer(tokenizer)
        self._begin()

    def _begin(self) -> None:
        self._detokenizer = self._detokenizer.another()
        self._num_tokens = self._num_chars = 0
        self._pieces: list[str] = []
        self._text_tail, self._whole_tail = _Tail(self._stops), _Tail(self._stops)  # with special tokens, the latter
        self._cut: int | None = None  # the length of the text, once a stop string was found

    def find(self, token_ids: TokenArray) -> str | None:
        """Return the stop string that the newest token completes; None if it completes none.

        token_ids: all generated tokens. They go on where an earlier call has ended, or some were taken back.
        """
        if len(token_ids) <= self._num_tokens:
            self._begin()
        stop = None
        for token in token_ids[self._num_tokens :].tolist():
            stop = self._take(token)
        return stop

    def end(self, token_ids: TokenArray) -> str | None:
        """Return the stop string in the rest of the text, which no token completes; None if there is none."""
        if len(token_ids) != self._num_tokens:
            self.find(token_ids)
        return None if self._cut is not None else self._search(self._detokenizer.flush(), is_text=True)

    @property
    def text(self) -> str:
        """The text so far; after `end`, or once a stop string was found, all of it."""
        return "".join(self._pieces)[: self._cut]

    def _take(self, token: int) -> str | None:
        self._num_tokens += 1
        if token in self._detokenizer.skipped_ids:
            return self._search(str(self._tokenizer.convert_ids_to_tokens(token)), is_text=False)
        return self._search(self._detokenizer.push([token]), is_text=True)

    def _search(self, piece: str, is_text: bool) -> str | None:
        """Take a piece, of the text or of a special token; return the stop string that it completes."""
        begin = self._num_chars
        if is_text:
            self._pieces.append(piece)
            self._num_chars += len(piece)
            offsets: Sequence[int] = range(begin, self._num_chars)
            places = [tail.find(piece, offsets) for tail in (self._text_tail, self._whole_tail)]
        else:
            places = [self._whole_tail.find(piece, [begin] * len(piece))]
        spans = [span for span in places if span is not None]
        if not spans or self._num_tokens <= self._min_tokens:
            return None
        at, end, stop = spans[0]
        self._cut = min(end, self._num_chars) if self._keeps_stop else at
        return stop

"""Answer: one sample beyond its token ids: its text up to a stop string, its guide, its log-probabilities.

Only requests that ask for one of these have it.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvpage.serving.params.sampling import SamplingParams
from kvpage.serving.text.guided_sequence import GuidedSequence
from kvpage.serving.text.token_logprobs import TokenLogprobs

TokenArray = npt.NDArray[np.int32]


class TextSearch(Protocol):
    """The text of one answer up to its first stop string; see StopSearch."""

    def find(self, token_ids: TokenArray) -> str | None:
        """Return the stop string that the newest token completes; None if it completes none."""

    def end(self, token_ids: TokenArray) -> str | None:
        """Return the stop string in the rest of the text, which no token completes; None if there is none."""

    @property
    def text(self) -> str:
        """The text so far."""


class Answer:
    """The text, guide and log-probabilities of one sample, as far as it has asked for them.

    logprobs: one for each token; None if they are not asked for. guided: its way through the guide; None without one.
    stop: the stop string that has ended it.
    """

    def __init__(
        self, search: TextSearch | None, guided: GuidedSequence | None, logprobs: list[TokenLogprobs] | None
    ) -> None:
        self._search, self.guided, self.logprobs = search, guided, logprobs
        self.stop: str | None = None

    def take(self, generated: TokenArray, logprobs: TokenLogprobs | None) -> bool:
        """Take the newest of the generated tokens; return whether its text or its guide ends with it."""
        if self.logprobs is not None and logprobs is not None:
            self.logprobs[len(generated) - 1 :] = [logprobs]
        self.stop = None if self._search is None else self._search.find(generated)
        return self.stop is not None or (self.guided is not None and self.guided.is_over(generated))

    def end(self, generated: TokenArray) -> bool:
        """End the text where no token has; return whether a stop string is in the rest of it."""
        if self._search is not None and self.stop is None:
            self.stop = self._search.end(generated)
        return self.stop is not None

    @property
    def has_text(self) -> bool:
        """Whether it searches its text."""
        return self._search is not None

    def text(self, generated: TokenArray) -> str:
        """Return the text of all generated tokens up to the stop string; for one that has_text, and has ended."""
        assert self._search is not None, "only an answer with stop strings has a text of its own"
        if self.stop is None:
            self._search.end(generated)
        return self._search.text


class AnswerRules(Protocol):
    """Makes the answers of one engine's requests; see TextRules."""

    def answer(self, params: SamplingParams, num_prompt_tokens: int) -> Answer | None:
        """Return a new one; None if the parameters ask for nothing of it."""

    def text(self, token_ids: Sequence[int]) -> str | None:
        """Return the text of generated tokens; None without a tokenizer."""

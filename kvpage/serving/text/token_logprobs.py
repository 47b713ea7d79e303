"""TokenLogprobs: how likely a token was, and which tokens were the likeliest. ScoredPrompt: those of a prompt."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log-probabilities of one token and of the likeliest ones in its place.

    They are log_softmax of the model's own logits in fp32: before penalties, masks, temperature and other rules.

    Attributes:
        logprob: That of the token.
        rank: 1 for the likeliest token, 2 for the next one and so on. Equally likely tokens have the same rank.
        top: Ids and log-probabilities of the likeliest tokens, the likeliest first, of equal ones the smaller id.
    """

    logprob: float
    rank: int
    top: list[tuple[int, float]]


class ScoredPrompt:
    """The log-probabilities of one prompt.

    num_top: likeliest tokens to name beside each. max_rows: rows of logits that one step may have for it.
    """

    def __init__(self, num_prompt_tokens: int, num_top: int, max_rows: int) -> None:
        self.num_top, self.max_rows = num_top, max_rows
        self._found: list[TokenLogprobs | None] = [None] * num_prompt_tokens
        self._num_found = 1

    @property
    def is_whole(self) -> bool:
        """Whether all tokens have theirs."""
        return self._num_found == len(self._found)

    @property
    def logprobs(self) -> list[TokenLogprobs | None] | None:
        """One for each token, None for the first one; None before it is whole."""
        return self._found if self.is_whole else None

    def take(self, begin: int, found: Sequence[TokenLogprobs]) -> None:
        """Take those of the tokens from `begin` on. A step that is computed again gives the same ones again."""
        assert 0 < begin <= self._num_found, "portions come without a gap"
        self._found[begin : begin + len(found)] = found
        self._num_found = max(self._num_found, begin + len(found))

"""ScoredPrompt: the log-probabilities of a prompt's tokens, as steps compute them.

prompt    [ t0    t1    t2    t3 ... ]
logits      l0    l1    l2              l0 says how likely t1 is: the first token has no log-probability
found     [ None  p1    p2 ... ]        from the first portion on, without a gap
"""

from collections.abc import Sequence

from kvpage.serving.text.token_logprobs import TokenLogprobs


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

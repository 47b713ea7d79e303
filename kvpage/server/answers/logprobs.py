"""Log-probabilities in OpenAI's two shapes: that of chats, and that of completions."""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from kvpage.server.answers.choice import Choice
from kvpage.server.answers.formats import long_list
from kvpage.server.text.vocabulary import Vocabulary
from kvpage.serving.text.token_logprobs import TokenLogprobs

LEAST = -9999.0  # JSON has no infinity


Logprobs = Sequence[TokenLogprobs | None]


class LogprobsFormat(Protocol):
    """Writes the field `logprobs` of a choice."""

    def json(self, choice: Choice, token_ids: Sequence[int], logprobs: Logprobs) -> str: ...


class TokenNames:
    """The names by which log-probabilities show tokens. shows_ids: "token_id:17" in place of a text."""

    def __init__(self, vocabulary: Vocabulary, shows_ids: bool) -> None:
        self.vocabulary, self._shows_ids = vocabulary, shows_ids

    def __getitem__(self, token_id: int) -> str:
        """Return a token's name."""
        return f"token_id:{token_id}" if self._shows_ids else self.vocabulary[token_id][0]


class ChatLogprobs:
    """Log-probabilities of chats: an object for each token."""

    def __init__(self, names: TokenNames) -> None:
        self._names = names

    def json(self, choice: Choice, token_ids: Sequence[int], logprobs: Logprobs) -> str:
        """Return the log-probabilities of the choice's next tokens."""
        content = (
            self._of_token(token_id, token_logprobs)
            for token_id, token_logprobs in zip(token_ids, logprobs, strict=True)
        )
        return f'{{"content":{long_list(content)},"refusal":null}}'

    def _of_token(self, token_id: int, token_logprobs: TokenLogprobs | None) -> dict[str, Any]:
        assert token_logprobs is not None, "every generated token has them"
        top = [self._entry(top_id, value) for top_id, value in token_logprobs.top]
        return {**self._entry(token_id, token_logprobs.logprob), "top_logprobs": top}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        text_bytes = list(self._names.vocabulary[token_id][1])
        return {"token": self._names[token_id], "logprob": max(logprob, LEAST), "bytes": text_bytes}


class CompletionLogprobs:
    """Log-probabilities of completions: four lists. The first token of a prompt has none."""

    def __init__(self, names: TokenNames) -> None:
        self._names = names

    def json(self, choice: Choice, token_ids: Sequence[int], logprobs: Logprobs) -> str:
        """Return the log-probabilities of the choice's next tokens, and count their characters."""
        offsets = []
        for token_id in token_ids:
            offsets.append(choice.num_characters)
            choice.count_characters(len(self._names.vocabulary[token_id][0]))
        fields: dict[str, Iterable[Any]] = {
            "tokens": (self._names[token_id] for token_id in token_ids),
            "token_logprobs": (
                None if token_logprobs is None else max(token_logprobs.logprob, LEAST) for token_logprobs in logprobs
            ),
            "top_logprobs": (
                self._tops(token_id, token_logprobs)
                for token_id, token_logprobs in zip(token_ids, logprobs, strict=True)
            ),
            "text_offset": offsets,
        }
        return "{" + ",".join(f'"{name}":{long_list(values)}' for name, values in fields.items()) + "}"

    def _tops(self, token_id: int, token_logprobs: TokenLogprobs | None) -> dict[str, float] | None:
        if token_logprobs is None:
            return None
        by_text: dict[str, float] = {}
        for top_id, value in [*token_logprobs.top, (token_id, token_logprobs.logprob)]:
            by_text.setdefault(self._names[top_id], max(value, LEAST))  # of tokens with one text the likeliest
        return by_text

"""Choice: the text of one sample, as it may be shown.

    tokens ─► Detokenizer ─► held: text that may begin a stop string ─► text

The engine decides where a sample ends. Here the text is only cut there.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kvpage.serving import Detokenizer
from kvpage.serving.loop.outputs import FinishReason


@dataclass(frozen=True, slots=True)
class TextRules:
    """The rules by which the tokens of a request become text.

    Attributes:
        stop_strings: The stop strings.
        end_token_ids: The tokens that end a sample, and whose text is left out.
        keeps_stop: Whether the text ends with the stop string, or with the text of the token that ended it.
        skips_special: Whether special tokens have no text.
    """

    stop_strings: Sequence[str]
    end_token_ids: Collection[int]
    keeps_stop: bool
    skips_special: bool


class Choice:
    """One sample of a prompt.

    Attributes:
        index: Its place among the answer's choices.
        num_tokens: Tokens so far.
        finish_reason: Set with the last token.
        stop_reason: The stop string or token that has ended it.
        num_characters: Characters of the tokens whose log-probabilities were shown, for their places in the text.
        has_calls: Whether it has called a tool.
    """

    __slots__ = ("_detokenizer", "_held", "_num_shown", "_rules", "finish_reason", "has_calls", "index",
                 "num_characters", "num_tokens", "stop_reason")  # fmt: skip

    def __init__(self, index: int, detokenizer: Detokenizer, rules: TextRules) -> None:
        self.index, self.num_tokens, self.num_characters, self.has_calls = index, 0, 0, False
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self._detokenizer, self._rules = detokenizer, rules
        self._held, self._num_shown = "", 0

    def note_calls(self, num_calls: int) -> None:
        """Note the calls of tools in a piece of its text."""
        self.has_calls |= num_calls > 0

    def take(self, token_ids: Sequence[int]) -> str:
        """Take tokens after which the sample goes on; return the text that can be shown."""
        self.num_tokens += len(token_ids)
        text = self._detokenizer.push(token_ids)
        if not self._rules.stop_strings:
            return text
        text = self._held + text
        num_held = held_length(text, self._rules.stop_strings)
        self._held = text[len(text) - num_held :]
        self._num_shown += len(text) - num_held
        return text[: len(text) - num_held]

    def end(
        self, token_ids: Sequence[int], reason: FinishReason, stop_reason: str | int | None, whole: str | None
    ) -> str:
        """Take the last tokens; return the rest of the text.

        whole: all of the text without special tokens, as the engine has cut it; None if it has not.
        """
        self.finish_reason, self.stop_reason = reason, stop_reason
        self.num_tokens += len(token_ids)
        text = self._held + self._detokenizer.push(self._shown(token_ids)) + self._detokenizer.flush()
        self._held = ""
        if not isinstance(stop_reason, str):
            return text
        if whole is not None and self._rules.skips_special:
            return whole[self._num_shown :]
        if (at := text.find(stop_reason)) >= 0:
            return text[: at + len(stop_reason)] if self._rules.keeps_stop else text[:at]
        return text

    def count_characters(self, number: int) -> None:
        """Note that the log-probabilities of `number` more characters were shown."""
        self.num_characters += number

    def _shown(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Return the last tokens without the one that has ended the sample."""
        is_end = self.finish_reason == "stop" and bool(token_ids) and token_ids[-1] in self._rules.end_token_ids
        return (
            token_ids[:-1]
            if is_end and not isinstance(self.stop_reason, str) and not self._rules.keeps_stop
            else token_ids
        )


def held_length(text: str, stop_strings: Sequence[str]) -> int:
    """Return how many characters at the end of `text` may be the begin of a stop string, the whole of none."""
    longest = 0
    for stop in stop_strings:
        for length in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:length]):
                longest = length
                break
    return longest

"""Prompt: the text and token ids from which a request asks the model to go on."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvpage.blocks.groups.states.marks import MIN_SAVED


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt.

    Attributes:
        token_ids: Its tokens.
        text: Its text, where that is shown.
        borders: Numbers of tokens after which later prompts are likely to part from it, in order.
    """

    token_ids: list[int]
    text: str = ""
    borders: tuple[int, ...] = ()

    def cut(self, num_tokens: int) -> "Prompt":
        """Return the prompt with its last tokens alone, num_tokens at most."""
        num_left_out = max(len(self.token_ids) - num_tokens, 0)
        borders = tuple(border - num_left_out for border in self.borders if border > num_left_out)
        return Prompt(self.token_ids[num_left_out:], self.text, borders)

    def with_borders(self, cache_at: Sequence[int]) -> list[int]:
        """Return a caller's marks, and the borders at which a state is worth its while, in order."""
        return sorted({*cache_at, *(border for border in self.borders if border >= MIN_SAVED)})

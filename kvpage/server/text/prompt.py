"""Prompt: what a request asks the model to go on from."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as tokens, and as text where that is shown."""

    token_ids: list[int]
    text: str = ""

"""CompletionRequest: the body of /v1/completions."""

from typing import Annotated, Any

from pydantic import PlainValidator, model_validator

from kvpage.server.protocol.chat_request import ChatRequest
from kvpage.server.protocol.errors import bad_request
from kvpage.server.protocol.sampling_fields import Count, Positive, SamplingFields, within

DEFAULT_MAX_TOKENS = 16
OnePrompt = str | list[int]


def _prompts(value: Any) -> list[OnePrompt]:
    """Return one or several prompts, each as text or as token ids, as a list."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if _are_ids(value):
            return [value]
        if all(isinstance(prompt, str) for prompt in value) or all(
            isinstance(prompt, list) and _are_ids(prompt) for prompt in value
        ):
            return value
    raise ValueError("prompt must be text, token ids, or a list of either, and not empty")


def _are_ids(values: list[Any]) -> bool:
    return set(map(type, values)) == {int}


class CompletionRequest(SamplingFields):
    """A completion of one or several prompts."""

    prompt: Annotated[list[OnePrompt], PlainValidator(_prompts)]
    echo: bool = False
    logprobs: Count | None = None
    best_of: Positive | None = None
    add_special_tokens: bool = True

    @property
    def num_logprobs(self) -> int | None:
        """How many likeliest tokens are shown beside each; None for no log-probabilities at all."""
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same of the prompt's tokens, which an echo shows."""
        return self.logprobs if self.echo else None

    @property
    def num_prompts(self) -> int:
        """The prompts of the batch."""
        return len(self.prompt)

    @property
    def shows_prompt(self) -> bool:
        """Whether each sample of the answer shows its prompt."""
        return self.return_token_ids or self.echo

    def most_tokens(self, num_left: int) -> int:
        """Return how many tokens are generated at most."""
        if self.max_tokens == 0 and self.echo:
            return 1  # it is not shown
        return within(DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens, num_left)

    @model_validator(mode="after")
    def _best_is_all(self) -> "CompletionRequest":
        if self.best_of is not None and self.best_of != self.n:
            raise bad_request(f"best_of must equal n={self.n}, got {self.best_of}", param="best_of")
        return self


AnyRequest = CompletionRequest | ChatRequest
"""A body of a route that generates text."""

"""Usage: the tokens that a request has used."""

from dataclasses import dataclass


@dataclass(slots=True)
class Usage:
    """The tokens of one HTTP request, all its prompts and samples together.

    Attributes:
        prompt_tokens: Tokens of the prompts.
        completion_tokens: Tokens that were generated.
        cached_tokens: Tokens of the prompts whose K and V were in the cache; None until it is known.
    """

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int | None = None

    def found(self, num_tokens: int) -> None:
        """Note that num_tokens tokens of one more prompt were in the cache."""
        self.cached_tokens = (self.cached_tokens or 0) + num_tokens

    def generated(self, num_tokens: int) -> None:
        """Note how many tokens were generated so far."""
        self.completion_tokens = num_tokens

    def json(self) -> str:
        """Return it as JSON."""
        known = "null" if self.cached_tokens is None else f'{{"cached_tokens":{self.cached_tokens}}}'
        return (
            f'{{"prompt_tokens":{self.prompt_tokens},"completion_tokens":{self.completion_tokens},'
            f'"total_tokens":{self.prompt_tokens + self.completion_tokens},"prompt_tokens_details":{known}}}'
        )

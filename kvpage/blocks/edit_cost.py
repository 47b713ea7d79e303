"""EditCost: what a change of a cached text costs. Whoever keeps the text makes it; `explain` shows it."""

from dataclasses import dataclass
from typing import Literal, get_args

EditMode = Literal["exact", "erratum"]
MODES: tuple[str, ...] = get_args(EditMode)


@dataclass(frozen=True, slots=True)
class EditCost:
    """What an edit of a branch costs.

    Attributes:
        session_id: Of the session.
        branch: The branch.
        mode: "exact" or "erratum".
        start: The first token of the span.
        end: The token after the span.
        num_tokens: Tokens of the branch now.
        num_tokens_to_compute: Of these, those that are not cached: what the next request computes of the branch.
        num_released_tokens: Tokens of cached blocks that only the old text needed. They are evicted before all others.
    """

    session_id: str
    branch: str
    mode: EditMode
    start: int
    end: int
    num_tokens: int
    num_tokens_to_compute: int
    num_released_tokens: int

    def __str__(self) -> str:
        return (
            f"an edit ({self.mode}) of tokens {self.start} to {self.end} of session {self.session_id!r}, branch "
            f"{self.branch!r}: {self.num_tokens_to_compute} of {self.num_tokens} tokens were to compute, blocks of "
            f"{self.num_released_tokens} tokens were released"
        )

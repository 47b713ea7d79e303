"""SessionBranch: one line of a conversation: its tokens, and the pin that keeps their blocks."""

from dataclasses import dataclass

import numpy as np

from kvpage.blocks.sequence_state import Ids
from kvpage.checks.tokens import Tokens

NO_TOKENS = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class BranchAdapter:
    """The adapter that has computed a branch's last turn.

    Attributes:
        name: Its name then.
        digest: What its bytes add to the namespace of K and V; "" where it leaves these as they are.
    """

    name: str
    digest: str


@dataclass(slots=True)
class SessionBranch:
    """A branch. Only its session changes it.

    Attributes:
        tokens: int32 [num_tokens], the prompt and the answer of its last turn. They never change in place.
        pin: The handle of the pin on their blocks; None without one. The pin may have ended.
        adapter: That has computed their K and V; None for the base model.
    """

    tokens: Ids
    pin: int | None = None
    adapter: BranchAdapter | None = None

    @property
    def digest(self) -> str:
        """What the adapter adds to the namespace of K and V; "" for nothing."""
        return "" if self.adapter is None else self.adapter.digest


def num_common(tokens: Tokens, others: Tokens) -> int:
    """Return how many tokens two arrays share at their beginning.

    Args:
        tokens: int32 [num_tokens].
        others: int32 [num_others].
    """
    most = min(len(tokens), len(others))
    differs = np.flatnonzero(np.asarray(tokens)[:most] != np.asarray(others)[:most])
    return int(differs[0]) if len(differs) else most

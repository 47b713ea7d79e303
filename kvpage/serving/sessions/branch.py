"""SessionBranch: one line of a conversation: its tokens, and the pin that keeps their blocks."""

from dataclasses import dataclass

import numpy as np

from kvpage.blocks.sequence_state import Ids
from kvpage.checks.tokens import Tokens

NO_TOKENS = np.empty(0, np.int32)


@dataclass(slots=True)
class SessionBranch:
    """A branch. Only its session changes it.

    Attributes:
        tokens: int32 [num_tokens], the prompt and the answer of its last turn. They never change in place.
        pin: The handle of the pin on their blocks; None without one. The pin may have ended.
    """

    tokens: Ids
    pin: int | None = None


def num_common(tokens: Tokens, others: Tokens) -> int:
    """Return how many tokens two arrays share at their beginning.

    Args:
        tokens: int32 [num_tokens].
        others: int32 [num_others].
    """
    most = min(len(tokens), len(others))
    differs = np.flatnonzero(np.asarray(tokens)[:most] != np.asarray(others)[:most])
    return int(differs[0]) if len(differs) else most

"""Edit: a change of a session's text, exact or as an erratum, and its cost.

    the branch   [ 1 2 3 4 5 6 7 8 ]      edit(2, 4, [9])
    exact        [ 1 2 9 5 6 7 8 ]        all behind token 2 is computed; the old blocks go first
    erratum      [ 1 2 3 4 5 6 7 8 9 ]    the old text stays, and the correction is appended: an exact prefix

A changed field alone would not be forgotten: later K and V have taken notes of it (arXiv 2606.17107). So there is no
edit that leaves what is behind it as it was.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from kvpage.blocks.sequence_state import Ids

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


def edited(tokens: Ids, start: int, end: int, new_tokens: Ids, mode: EditMode) -> Ids:
    """Return the tokens of a branch after an edit, int32 [num_tokens].

    Args:
        tokens: int32, those before.
        start: The first token of the span.
        end: The token after it; start for an insertion.
        new_tokens: int32, in the span's place, or appended as an erratum.
        mode: "exact" or "erratum".

    Raises:
        ValueError: The span is not within the tokens, or there is no such mode.
    """
    if not 0 <= start <= end <= len(tokens):
        raise ValueError(f"start and end must be in order within [0, {len(tokens)}], got {start} and {end}")
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
    parts = [tokens, new_tokens] if mode == "erratum" else [tokens[:start], new_tokens, tokens[end:]]
    return np.concatenate(parts).astype(np.int32, copy=False)

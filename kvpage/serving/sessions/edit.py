"""edited: a branch's tokens after an edit, exact or as an erratum.

    the branch   [ 1 2 3 4 5 6 7 8 ]      a span of tokens 2 to 4, and 9 in its place
    exact        [ 1 2 9 5 6 7 8 ]        all behind token 2 is computed; the old blocks go first
    erratum      [ 1 2 3 4 5 6 7 8 9 ]    the old text stays, and the correction is appended: an exact prefix

A changed field alone would not be forgotten: later K and V have taken notes of it (arXiv 2606.17107). So there is no
edit that leaves what is behind it as it was.
"""

import numpy as np

from kvpage.blocks.explain import MODES, EditMode
from kvpage.blocks.sequence_state import Ids


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

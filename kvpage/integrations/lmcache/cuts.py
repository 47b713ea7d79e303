"""Cuts of requests into segments: after separators, or where the caller names boundaries.

separators     [ a b c | | d e f | | g ]         each segment keeps the separator at its end
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvpage.blend.boundaries import with_end


def cut_after_separators(tokens: npt.NDArray[np.int32], separator: npt.NDArray[np.int32]) -> list[int]:
    """Return the ends of the segments, ascending, the last one's included; none for no tokens.

    Of separators that overlap the first counts. Raises ValueError for a separator without tokens.
    """
    size = len(separator)
    if size < 1:
        raise ValueError("separator must have at least one token, got none")
    if len(tokens) < size:
        return [len(tokens)] if len(tokens) else []
    matches = (np.lib.stride_tricks.sliding_window_view(tokens, size) == separator).all(axis=1)
    cuts: list[int] = []
    for at in np.flatnonzero(matches).tolist():
        if not cuts or at >= cuts[-1]:
            cuts.append(at + size)
    return with_end(cuts, len(tokens))


def named_cuts(boundaries: Sequence[int], begin: int, end: int) -> list[int]:
    """Return the cuts of a request of the tokens [begin, end), relative to it, at boundaries that the caller names."""
    inner = [boundary - begin for boundary in boundaries if begin < boundary < end]
    return [*inner, end - begin] if end > begin else []

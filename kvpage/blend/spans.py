"""Span: one segment of a prompt. Segments end after each separator, or have lengths that the caller names.

    tokens     [ 5 6 7 # | 8 9 # | # | 3 4 ]        separator #: three segments, of which one is the separator alone
    given        4         3                        the lengths of the first two: the rest belongs to no segment

Tokens after the last segment, as a rule a question, are always computed, and never kept.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Span(NamedTuple):
    """The tokens [start, end) of a prompt."""

    start: int
    end: int


def spans_by_separator(tokens: npt.NDArray[np.int32], separator: Sequence[int]) -> list[Span]:
    """Return the segments that end with the separator, from left to right, without overlap. [] for no separator."""
    width = len(separator)
    if not 0 < width <= len(tokens):
        return []
    windows = np.lib.stride_tricks.sliding_window_view(tokens, width)
    spans, start = [], 0
    for separator_start in (windows == np.asarray(separator)).all(axis=1).nonzero()[0].tolist():
        if separator_start >= start:
            spans.append(Span(start, separator_start + width))
            start = separator_start + width
    return spans


def spans_of_lengths(lengths: Sequence[int], num_tokens: int) -> list[Span]:
    """Return segments of these lengths, one after the other from the first token on.

    Raises ValueError unless the lengths are positive integers that fit into num_tokens.
    """
    lengths = list(lengths)
    if not all(isinstance(length, int) and not isinstance(length, bool) and length > 0 for length in lengths):
        raise ValueError(f"segments must be positive lengths, got {lengths}")
    if sum(lengths) > num_tokens:
        raise ValueError(f"segments must fit into {num_tokens} tokens, got lengths of {sum(lengths)} together")
    ends = np.cumsum(lengths, dtype=np.int64).tolist()
    return [Span(end - length, end) for end, length in zip(ends, lengths, strict=True)]

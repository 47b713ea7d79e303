"""ContentBoundaries: cuts a text into segments by its contents.

    [ a b c | d e f g | h ]      a cut after each window of tokens whose hash is larger than all others near it

Only tokens count. So a text has the same segments wherever it is, up to a window and a neighbourhood from its ends.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpage.checks.tokens import as_tokens
from kvpage.checks.values import check_at_least

MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class ContentBoundaries:
    """Cuts a text after each window whose hash is the only largest among its neighbours.

    Neighbours are the windows that end up to min_length - 1 tokens before or after it.

    Attributes:
        window: tokens that are hashed together.
        min_length: tokens between two such cuts, at least; on average about twice as many.
        max_length: longer segments, as in repetitive texts, are cut into equal parts; at least twice min_length.

    Raises:
        ValueError: a field breaks a rule.
    """

    window: int = 16
    min_length: int = 64
    max_length: int = 1024

    def __post_init__(self) -> None:
        for name, least in (("window", 1), ("min_length", 2), ("max_length", 0)):
            check_at_least(name, getattr(self, name), least or 2 * self.min_length)

    def cuts(self, tokens: npt.NDArray[np.int32]) -> list[int]:
        """Cut a text.

        Args:
            tokens: int32 [num_tokens].

        Returns:
            The ends of the segments, ascending, the last one's included; none for no tokens.

        Raises:
            ValueError: tokens are not token ids.
        """
        tokens = as_tokens(tokens)
        if not len(tokens):
            return []
        hashes = _window_hashes(tokens, self.window)
        peaks = [at + self.window for at in _only_largest(hashes, self.min_length - 1)]
        whole = with_end(peaks, len(tokens))
        return [cut for begin, end in zip([0, *whole], whole, strict=False) for cut in self._parts(begin, end)]

    def _parts(self, begin: int, end: int) -> list[int]:
        count = -(-(end - begin) // self.max_length)
        return [begin + (end - begin) * part // count for part in range(1, count + 1)]


def _window_hashes(tokens: npt.NDArray[np.int32], window: int) -> npt.NDArray[np.uint64]:
    """Return the hash of each run of `window` tokens: a polynomial modulo 2**64, mixed."""
    count = max(len(tokens) - window + 1, 0)
    mixed = _mix(tokens.astype(np.int64).view(np.uint64))
    sums = np.zeros(count, np.uint64)
    for offset in range(window):
        sums = sums * MULTIPLIER + mixed[offset : offset + count]
    return _mix(sums)


def _mix(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Mix every bit of a word into every bit of the result (the end of splitmix64)."""
    words = words + MULTIPLIER
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _only_largest(hashes: npt.NDArray[np.uint64], radius: int) -> list[int]:
    """Return the places of hashes larger than the `radius` before and the `radius` after them, which must all exist."""
    if len(hashes) < 2 * radius + 1:
        return []
    largest = np.lib.stride_tricks.sliding_window_view(hashes, radius).max(axis=1)
    inner = hashes[radius : len(hashes) - radius]
    before, after = largest[: len(inner)], largest[radius + 1 : radius + 1 + len(inner)]
    indices = np.flatnonzero((inner > before) & (inner > after)) + radius
    return [int(at) for at in indices]


def with_end(cuts: list[int], end: int) -> list[int]:
    """Return the cuts and the end, which comes once."""
    return cuts if cuts and cuts[-1] == end else [*cuts, end]

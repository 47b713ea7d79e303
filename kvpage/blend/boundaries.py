"""Where the segments of a prompt begin and end: behind separators, or where the text itself says.

    separators     [ a b c | | d e f | | g ]         each segment keeps the separator at its end
    contents       a hash over a window of tokens is larger than all others near it: a cut behind the window

Both look at tokens alone, so that a text has the same segments wherever it stands: by contents, up to a window and a
neighbourhood from the text's ends.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpage.checks.tokens import as_tokens

MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def cut_behind_separators(tokens: npt.NDArray[np.int32], separator: npt.NDArray[np.int32]) -> list[int]:
    """Ascending: where a segment ends, and the last one's end; none for no tokens. Of separators that overlap the first
    counts. ValueError for a separator without tokens.
    """
    size = len(separator)
    if size < 1:
        raise ValueError("separator must have at least one token, got none")
    if len(tokens) < size:
        return [len(tokens)] if len(tokens) else []
    found = (np.lib.stride_tricks.sliding_window_view(tokens, size) == separator).all(axis=1)
    cuts: list[int] = []
    for at in np.flatnonzero(found).tolist():
        if not cuts or at >= cuts[-1]:
            cuts.append(at + size)
    return _with_end(cuts, len(tokens))


@dataclass(frozen=True, slots=True)
class ContentBoundaries:
    """Cuts a text by its contents: behind each window whose hash is the only largest of those that end up to
    min_length - 1 tokens before and behind it.

    window: tokens that are hashed. min_length: of the segments between two such cuts; on average they have about twice
    as many. max_length: longer ones, as repetitive texts have, are cut into equal parts; at least twice min_length.
    """

    window: int = 16
    min_length: int = 64
    max_length: int = 1024

    def __post_init__(self) -> None:
        for name, least in (("window", 1), ("min_length", 2), ("max_length", 0)):
            value = getattr(self, name)
            least = least or 2 * self.min_length
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")

    def cuts(self, tokens: npt.NDArray[np.int32]) -> list[int]:
        """Ascending: where a segment ends, and the last one's end; none for no tokens. ValueError as of as_tokens."""
        tokens = as_tokens(tokens)
        if not len(tokens):
            return []
        hashes = _window_hashes(tokens, self.window)
        peaks = [at + self.window for at in _only_largest(hashes, self.min_length - 1)]
        whole = _with_end(peaks, len(tokens))
        return [cut for begin, end in zip([0, *whole], whole, strict=False) for cut in self._parts(begin, end)]

    def _parts(self, begin: int, end: int) -> list[int]:
        count = -(-(end - begin) // self.max_length)
        return [begin + (end - begin) * part // count for part in range(1, count + 1)]


def named_cuts(boundaries: Sequence[int], begin: int, end: int) -> list[int]:
    """The cuts of a request of the tokens [begin, end), relative to it, by boundaries that the caller names."""
    inner = [boundary - begin for boundary in boundaries if begin < boundary < end]
    return [*inner, end - begin] if end > begin else []


def _window_hashes(tokens: npt.NDArray[np.int32], window: int) -> npt.NDArray[np.uint64]:
    """Of each run of `window` tokens: a polynomial modulo 2**64, mixed."""
    count = max(len(tokens) - window + 1, 0)
    mixed = _mix(tokens.astype(np.int64).view(np.uint64))
    sums = np.zeros(count, np.uint64)
    for offset in range(window):
        sums = sums * MULTIPLIER + mixed[offset : offset + count]
    return _mix(sums)


def _mix(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Every bit of a word into every bit of the result (the end of splitmix64)."""
    words = words + MULTIPLIER
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _only_largest(hashes: npt.NDArray[np.uint64], radius: int) -> list[int]:
    """Where a hash is larger than the `radius` before and the `radius` behind it; all of those have to exist."""
    if len(hashes) < 2 * radius + 1:
        return []
    largest = np.lib.stride_tricks.sliding_window_view(hashes, radius).max(axis=1)
    inner = hashes[radius : len(hashes) - radius]
    before, behind = largest[: len(inner)], largest[radius + 1 : radius + 1 + len(inner)]
    found = np.flatnonzero((inner > before) & (inner > behind)) + radius
    return [int(at) for at in found]


def _with_end(cuts: list[int], end: int) -> list[int]:
    return cuts if cuts and cuts[-1] == end else [*cuts, end]

"""Histogram: the number of values in each range."""

from bisect import bisect_left
from dataclasses import dataclass

SECONDS = tuple(float(f"{digit}e{power}") for power in range(-3, 5) for digit in (1, 3))  # 1 ms to 8 hours


@dataclass(frozen=True, slots=True)
class HistogramStats:
    """Counts of values by range.

    Attributes:
        bounds: Upper bounds of the ranges, ascending.
        counts: Number of values up to bounds[0], then of values above it up to bounds[1], and so on. The last is the
            number above all bounds.
        total: The sum of the values.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def count(self) -> int:
        """Number of all values."""
        return sum(self.counts)


class Histogram:
    """Counts values by range. bounds: Upper bounds of the ranges, ascending."""

    def __init__(self, bounds: tuple[float, ...] = SECONDS) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def stats(self) -> HistogramStats:
        """Return the counts so far."""
        return HistogramStats(self._bounds, tuple(self._counts), self._total)

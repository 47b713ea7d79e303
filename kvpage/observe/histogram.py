"""Histogram: how often values fell into which range."""

from bisect import bisect_left
from dataclasses import dataclass

SECONDS = tuple(float(f"{digit}e{power}") for power in range(-3, 5) for digit in (1, 3))  # 1 ms to 8 hours


@dataclass(frozen=True, slots=True)
class HistogramStats:
    """counts: of the values up to bounds[0], then of those above it up to bounds[1], ..., at last above all bounds.
    total: the sum of the values.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def count(self) -> int:
        return sum(self.counts)


class Histogram:
    """bounds: ascending."""

    def __init__(self, bounds: tuple[float, ...] = SECONDS) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def stats(self) -> HistogramStats:
        return HistogramStats(self._bounds, tuple(self._counts), self._total)

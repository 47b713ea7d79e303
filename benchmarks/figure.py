"""A figure is a median with its quartiles, of measurements that took turns with those it is compared with."""

import gc
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Figure:
    """The median of `num` measurements, and the quartiles between which half of them are.

    Formats as numbers do: f"{figure:.2f}" gives "3.35 (3.30-3.52)".
    """

    median: float
    low: float
    high: float
    num: int

    @classmethod
    def of(cls, values: Iterable[float], scale: float = 1.0) -> "Figure":
        """Args: values: at least one finite number. scale: multiplies each, to change the unit."""
        array = np.asarray(list(values), np.float64) * scale
        if array.size == 0 or not np.isfinite(array).all():
            raise ValueError(f"values must be one or more finite numbers, got {array.tolist()}")
        low, median, high = np.percentile(array, (25, 50, 75)).tolist()
        return cls(median, low, high, array.size)

    @classmethod
    def ratio(cls, numerators: Sequence[float], denominators: Sequence[float]) -> "Figure":
        """Return the figure of quotients, turn by turn: a slow turn leaves its quotient as it is."""
        return cls.of(a / b for a, b in zip(numerators, denominators, strict=True))

    @classmethod
    def rate(cls, amount: float, seconds: Sequence[float]) -> "Figure":
        """Return the figure of an amount a turn, per second."""
        return cls.of(amount / taken for taken in seconds)

    def __mul__(self, factor: float) -> "Figure":
        """Return it in another unit."""
        return Figure(self.median * factor, self.low * factor, self.high * factor, self.num)

    def __format__(self, spec: str) -> str:
        return f"{self.median:{spec}} ({self.low:{spec}}-{self.high:{spec}})"

    def __str__(self) -> str:
        return format(self, f".{max(0, 2 - math.floor(math.log10(abs(self.median) or 1.0)))}f")


def seconds(call: Callable[[], object], number: int = 1, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the time of one call, a mean over `number` in a loop. Use many for calls of less than a millisecond."""
    if number == 1:
        before = clock()
        call()
        return clock() - before
    calls = range(number)
    before = clock()
    for _ in calls:
        call()
    return (clock() - before) / number


def thread_seconds(call: Callable[[], object], number: int = 1) -> float:
    """Return the same by the thread's own time, which other processes disturb less."""
    return seconds(call, number, time.thread_time)


def result(call: Callable[[], Any], number: int = 1) -> Any:
    """Return the measure that a call itself returns."""
    return call()


def in_turns(
    calls: Mapping[str, Callable[[], Any]],
    rounds: int,
    number: int = 1,
    measure: Callable[[Callable[[], Any], int], Any] = seconds,
    warmups: int = 1,
    rotates: bool = False,
) -> dict[str, list[Any]]:
    """Return the measure of each call in each round. All take turns, so that a noisy moment meets them all.

    The garbage collector is off meanwhile: it would charge one call for the garbage of another.

    Args:
        measure: Makes a call `number` times, and returns its measure; by default the seconds of one.
        warmups: Rounds before, which do not count.
        rotates: Whether each round begins with the next call, so that none always follows the same one.
    """
    measures: dict[str, list[Any]] = {name: [] for name in calls}
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for turn in range(rounds + warmups):
            first = turn % len(calls) if rotates else 0
            for name, call in [*islice(calls.items(), first, None), *islice(calls.items(), first)]:
                spent = measure(call, number)
                if turn >= warmups:
                    measures[name].append(spent)
    finally:
        if was_enabled:
            gc.enable()
    return measures


def within(seconds: float, results: Iterable[Any]) -> Iterator[Any]:
    """Yield results until `seconds` have passed, at least one; print where others are left out."""
    deadline = time.monotonic() + seconds
    for result in results:
        yield result
        if time.monotonic() > deadline:
            print(f"stopped after {seconds:.0f} s: --seconds gives more")
            return


def dumps(result: Any) -> str:
    """One line of JSON, in which a Figure is {"median", "low", "high", "num"}."""
    return json.dumps(result, default=lambda value: asdict(value) if isinstance(value, Figure) else str(value))

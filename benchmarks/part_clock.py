"""PartClock: the time that a call spends in each of some functions."""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple


class Spent(NamedTuple):
    """Seconds: of the clock on the wall, and of the thread's own."""

    wall: float
    thread: float


def spent_by(call: Callable[[], object], number: int = 1) -> Spent:
    """Return the time of a call, a mean over `number` in a row."""
    calls = range(number)
    wall, thread = time.perf_counter(), time.thread_time()
    for _ in calls:
        call()
    return Spent((time.perf_counter() - wall) / number, (time.thread_time() - thread) / number)


def mean_spent(each: Sequence[Spent]) -> Spent:
    return Spent(*(sum(clock) / len(each) for clock in zip(*each, strict=True)))


class PartClock:
    """Clocks functions from `with` to its end. A part's seconds contain none of the parts that it calls.

        step ├──────┬── schedule ──┬──┬── run ─┬─ slots ─┬──┬──────┤
             │ step │   schedule   │s │  run   │  slots  │r │ step │

    parts: the functions of each part, as an owner (a class or a module) and a name there.
    seconds: of each part so far.
    """

    def __init__(
        self, parts: Mapping[str, Sequence[tuple[Any, str]]], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.seconds = dict.fromkeys(parts, 0.0)
        self._clock, self._inside = clock, [0.0]
        self._own = [(part, owner, name, getattr(owner, name)) for part, each in parts.items() for owner, name in each]

    def __enter__(self) -> "PartClock":
        for part, owner, name, own in self._own:
            setattr(owner, name, self._clocked(part, own))
        return self

    def __exit__(self, *error: object) -> None:
        for _, owner, name, own in self._own:
            setattr(owner, name, own)

    def _clocked(self, part: str, own: Callable[..., Any]) -> Callable[..., Any]:
        clock, inside, seconds = self._clock, self._inside, self.seconds

        @functools.wraps(own)
        def clocked(*args: Any, **kwargs: Any) -> Any:
            inside.append(0.0)
            begin = clock()
            try:
                return own(*args, **kwargs)
            finally:
                spent = clock() - begin
                seconds[part] += spent - inside.pop()
                inside[-1] += spent

        return clocked

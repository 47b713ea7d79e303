"""Battery: a long experiment that must never go wrong, in a short form for the test run and a long one for the night.

    Battery.run(seed, count, advance) ─► figures        raises at the first wrong thing, which names the seed

`seed` and `count` decide all that happens, where threads and processes do not; `advance(n)` tells that n more are done,
and is False when time is over: a battery may end early then, and says in its figures how many of its unit it has done.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

Figures = dict[str, int | float]
Advance = Callable[[int], object]


@dataclass(frozen=True, slots=True)
class Battery:
    """name: as in the tables. unit: what `count` counts. short, long: how many in the test run, and in the long form.
    run: see above. needs: why it cannot run here; None where it can. limits: what figures may be at most in the long
    form, such as times, which the test run does not judge. longest: of one round of the long form; None for `short`.
    """

    name: str
    unit: str
    short: int
    long: int
    run: Callable[[int, int, Advance], Figures]
    needs: str | None = None
    limits: dict[str, float] = field(default_factory=dict)
    longest: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.short <= self.long:
            raise ValueError(f"short must be positive and at most long, got {self.short} and {self.long}")

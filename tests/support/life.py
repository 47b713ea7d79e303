"""Life: random operations on a part beside its model. A failure names the seed, the step and the operation.

Life(seed) ─► live(num_steps) ─► end()        a short one runs with the tests, a long one in tests/reliability
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

from support.seeds import replay, seed_of

from kvpage import OutOfBlocks

Operation = Callable[[], object]


class Life:
    """A subclass says which operations there are, and what must hold after each.

    rng: decides all that happens. figures: how often what happened; a test asks whether a life was interesting.
    """

    def __init__(self, seed: int) -> None:
        self.seed, self.rng = seed, random.Random(seed)
        self.figures: Counter[str] = Counter()

    def operations(self) -> dict[Operation, float]:
        """Return the operations, each with its weight."""
        raise NotImplementedError

    def do(self, operation: Operation) -> None:
        """Do one. A subclass may expect errors of it."""
        operation()

    def compare(self) -> None:
        """Require that all that can be seen is the model's."""

    def end(self) -> None:
        """Give everything back, and require that nothing is left."""

    def live(self, num_steps: int, compare_every: int = 1) -> None:
        """Do so many operations, compare after some of them and the last, and end."""
        weights, done = self.operations(), "its beginning"
        try:
            for step, operation in enumerate(self.rng.choices(list(weights), list(weights.values()), k=num_steps)):
                done = f"step {step}, {getattr(operation, '__name__', operation)}"
                self.do(operation)
                if step % compare_every == 0 or step == num_steps - 1:
                    self.compare()
            self.end()
        except BaseException as error:
            error.add_note(f"{type(self).__name__} with seed {self.seed}, {done}; today's seed: {replay()}")
            raise


class ScarceLife(Life):
    """A life in which an operation may be refused for lack of blocks or slots."""

    def do(self, operation: Operation) -> None:
        try:
            operation()
        except OutOfBlocks as error:
            self.figures["refused"] += 1
            assert error.needed > error.free


class World(Protocol):
    """Where lives begin: sizes and options."""

    def life(self, seed: int) -> Life: ...


def lived(worlds: Sequence[World], num_steps: int) -> list[Life]:
    """Return a life of today in each world, at its end."""
    lives = [world.life(seed_of(number)) for number, world in enumerate(worlds)]
    for life in lives:
        life.live(num_steps)
    return lives


def total(lives: Sequence[Life]) -> Counter[str]:
    """Return the figures of all."""
    return sum((life.figures for life in lives), Counter())

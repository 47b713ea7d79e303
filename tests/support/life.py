"""Life: random operations on a part beside its model. A failure names the seed, the step and the operation.

Life(seed) ─► live(num_steps) ─► end()        a short one runs with the tests, a long one in tests/reliability
"""

import random
from collections import Counter
from collections.abc import Callable

from support.seeds import replay

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
        weights = self.operations()
        for step, operation in enumerate(self.rng.choices(list(weights), list(weights.values()), k=num_steps)):
            try:
                self.do(operation)
                if step % compare_every == 0 or step == num_steps - 1:
                    self.compare()
            except BaseException as error:
                what = f"step {step}, {getattr(operation, '__name__', operation)}, of {type(self).__name__}"
                error.add_note(f"{what} with seed {self.seed}; today's: {replay()}")
                raise
        self.end()

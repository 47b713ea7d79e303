"""PackedPass: the states of a forward of a view, whose runner computes the rows' new tokens as one packed row.

slots     [ state of row 0 ] [ state of row 1 ]     the runner reads and writes them in place
before    a copy of both, which a forward that fails puts back
"""

from collections.abc import Sequence

import torch

from kvpage.cache.state_cache import StateCache
from kvpage.serving.model.states.state_pass import StatePass, StateRow


class PackedPass:
    """The states of all rows of a cache. rows: of each one, its slot, the positions to compute, and marks."""

    def __init__(self, cache: StateCache, rows: Sequence[StateRow]) -> None:
        self._cache, self._rows = cache, rows
        self._slots = torch.tensor([row.slot for row in rows])
        self._before: torch.Tensor | None = cache.slots[self._slots]

    @property
    def has_marks(self) -> bool:
        """Whether states of some rows are to be kept."""
        return any(row.marks for row in self._rows)

    def of_step(self, rows: Sequence[int]) -> StatePass:
        """Return the states of a step that computes these rows."""
        return StatePass(self._cache, [self._rows[row] for row in rows])

    def is_done(self) -> bool:
        """Return True: the runner raises where a state was not computed."""
        return True

    def finish(self) -> None:
        """Leave what was computed."""
        self._before = None

    def undo(self) -> None:
        """Put back the states of before, unless the pass has finished."""
        if self._before is not None:
            self._cache.slots[self._slots] = self._before

"""RowPass: the states of one forward over the rows of a batch, all of one length.

    slots      [ state of row 0 ] [ state of row 1 ]        unchanged until the forward is done
    pass         a copy of all, which mixers read and write
    marks      after so many tokens, the states of some rows go to slots of their own

A forward that fails changes no slot of a row.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import torch

from kvpage.cache.state_cache import StateKey
from kvpage.serving.model.states.piece_cache import PieceCache


class RowPass:
    """The states of rows, for tokens [start, end) of each.

    states: what mixers read and write; see PieceCache.

    Args:
        views: The states of all slots: see StateCache.
        slots: The slot of each row, int64 [num_rows] on the device of the views.
        start: Tokens before. With 0 there are no states, whatever is in the slots.
        end: Tokens after.
        marks: For each row, (position, slot) with start < position <= end.
        num_prompt: How many tokens of each row are a prompt's. A single one after them was generated.
    """

    def __init__(
        self,
        views: Mapping[StateKey, torch.Tensor],
        slots: torch.Tensor,
        start: int,
        end: int,
        marks: Sequence[Sequence[tuple[int, int]]],
        num_prompt: int = 0,
    ) -> None:
        self.states = PieceCache(views, slots, start > 0)
        self._views, self._start, self._end = views, start, end
        self._is_answer = end - start == 1 and start >= num_prompt
        self._marks = [(position, row, slot) for row, own in enumerate(marks) for position, slot in own]

    @property
    def has_marks(self) -> bool:
        """Whether states of some rows are to be kept."""
        return bool(self._marks)

    @property
    def num_tokens(self) -> int:
        """Tokens of each row in this forward."""
        return self._end - self._start

    def is_scanned(self, piece: slice) -> bool:
        """Whether a piece is a single token after a state, that a prompt's scan would have computed."""
        return not self._is_answer and piece.stop - piece.start == 1 and self._start + piece.start > 0

    def pieces(self, is_stepwise: bool, is_scanned: bool) -> list[slice]:
        """Return the tokens of each call of a mixer, counted from the forward's first one.

        is_stepwise: After a state, the mixer takes one token a call. is_scanned: Only its last call does.
        """
        cuts = {position - self._start for position, _, _ in self._marks if position < self._end}
        if is_stepwise:
            first = min(cuts, default=self.num_tokens) if not self._start else 1
            every = range(first, self.num_tokens)
            after = [self.num_tokens - 1] if is_scanned and (self._start or cuts) else every
            cuts |= {cut for cut in after if cut > 0}
        bounds = [0, *sorted(cuts), self.num_tokens]
        return [slice(first, last) for first, last in pairwise(bounds)]

    def keep(self, keys: Iterable[StateKey], num_tokens: int) -> None:
        """Copy states of a mixer to the slots of marks, after so many tokens of the forward."""
        here = [(row, slot) for position, row, slot in self._marks if position == self._start + num_tokens]
        for key in keys if here else ():
            states = self.states.known(key)
            assert states is not None, "the mixer has computed it"
            for row, slot in here:
                self._views[key][slot].copy_(states[row])

    def copied(self, keys: Iterable[StateKey]) -> dict[StateKey, torch.Tensor]:
        """Return copies of the states of a mixer that has computed."""
        known = {key: self.states.known(key) for key in keys}
        return {key: states.clone() for key, states in known.items() if states is not None}

    def put(self, states: Mapping[StateKey, torch.Tensor]) -> None:
        """Set states of a mixer."""
        for key, of_rows in states.items():
            self.states.put(key, of_rows)

    def is_done(self) -> bool:
        """Return whether every state was computed."""
        return self.states.touched == set(self._views)

    def finish(self) -> None:
        """Put the states of all rows into their slots."""
        self.states.write_back()

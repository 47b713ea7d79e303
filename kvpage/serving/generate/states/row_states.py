"""The states of a KVPageCache's rows: RowStates has their slots, RowPass is one forward over them.

    slots      [ state of row 0 ] [ state of row 1 ]        unchanged until the forward is done
    pass         a copy of all, which mixers read and write
    marks      after a number of tokens, the states of some rows go to slots of their own

All rows have one length. A forward that fails changes no slot of a row.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch

from kvpage.blocks.manager import BlockManager
from kvpage.cache.state_cache import StateCache, StateKey
from kvpage.ops.cuda.uploads import upload
from kvpage.serving.model.states.mixer import PieceForward
from kvpage.serving.model.states.piece_cache import PieceCache
from kvpage.serving.model.states.state_pass import StatePass, StateRow


class RowPass:
    """The states of rows, for tokens [start, end) of each. With a start of 0 there are none, whatever is in the slots.

    states: what mixers read and write; see PieceCache. views: the states of all slots; see StateCache.
    slots: the slot of each row, int64 [num_rows] on the device of the views.
    marks: for each row, (position, slot) with start < position <= end.
    num_prompt: how many tokens of each row are a prompt's. The model has generated a single token after them.
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
        self._marks = [(position, row, slot) for row, row_marks in enumerate(marks) for position, slot in row_marks]

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
            steps = range(first, self.num_tokens)
            after = [self.num_tokens - 1] if is_scanned and (self._start or cuts) else steps
            cuts |= {cut for cut in after if cut > 0}
        bounds = [0, *sorted(cuts), self.num_tokens]
        return [slice(first, last) for first, last in pairwise(bounds)]

    def keep(self, keys: Iterable[StateKey], num_tokens: int) -> None:
        """Copy states of a mixer to the slots of marks, after num_tokens tokens of the forward."""
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


class PackedPass:
    """One forward of a view, whose runner computes in the rows' slots. A copy of them is put back after a failure.

    rows: of each row of a cache, its slot, the positions to compute, and marks.
    """

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


class RowStates:
    """Slots of a pool, for the rows of one cache after the other.

    forwards: Of the modules of the model that read and write states; none where a runner computes them.
    """

    def __init__(self, manager: BlockManager, cache: StateCache, forwards: Sequence[PieceForward]) -> None:
        self.forwards = forwards
        assert manager.states is not None, "the manager has a group of states"
        self._manager, self._group, self._cache = manager, manager.states, cache

    @property
    def shares_answers(self) -> bool:
        """Whether tokens that were generated leave what the same tokens of a prompt would."""
        return self._group.options.shares_answers

    @property
    def layer_ids(self) -> set[int]:
        """The layers that have states."""
        return {layer_id for layer_id, _, _ in self._cache.views}

    def begin(
        self, seq_ids: Sequence[Hashable], is_findable: Sequence[bool], start: int, end: int, num_prompt: int
    ) -> RowPass:
        """Return the states of a forward over the tokens [start, end) of each row. Moves that are due are made.

        num_prompt: How many of each row's tokens are a prompt's.
        """
        assert self.forwards, "no runner computes"
        rows = list(zip(seq_ids, is_findable, strict=True))
        marks = [self._group.reserve(seq_id, start, end) if findable else [] for seq_id, findable in rows]
        self._group.do_moves(self._cache.do_move)
        slots = np.array([self._group.slot_of(seq_id) for seq_id in seq_ids], np.int64)
        return RowPass(self._cache.views, upload([slots], self._cache.device)[0], start, end, marks, num_prompt)

    def begin_packed(self, seq_ids: Sequence[Hashable], starts: Sequence[int], ends: Sequence[int]) -> PackedPass:
        """Return the states of a runner's forward over the tokens [starts[i], ends[i]) of each row, as `begin`."""
        bounds = list(zip(seq_ids, starts, ends, strict=True))
        marks = [self._group.reserve(*bound) if bound[1] < bound[2] else [] for bound in bounds]
        self._group.do_moves(self._cache.do_move)
        slots = [self._group.slot_of(seq_id) for seq_id in seq_ids]
        return PackedPass(self._cache, [StateRow(*row) for row in zip(slots, starts, ends, marks, strict=True)])

    def keep(self, seq_ids: Sequence[Hashable]) -> None:
        """Make the states at marks findable, whose tokens are committed."""
        for seq_id in seq_ids:
            self._manager.keep(seq_id)

    def keep_ends(self, seq_ids: Sequence[Hashable]) -> None:
        """Make the states of rows findable, whose tokens are all committed. The rows are released next."""
        for seq_id in seq_ids:
            self._manager.keep_end(seq_id)

    def copy(self, seq_id: Hashable, to: Hashable) -> None:
        """Copy the state of a row to another."""
        self._group.do_moves(self._cache.do_move)
        self._cache.copy(torch.tensor([[self._group.slot_of(seq_id), self._group.slot_of(to)]]))

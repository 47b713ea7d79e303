"""StatePass: the states of one forward pass. Each mixer computes its packed row piece by piece.

    packed row        [ a17 | b5 | c0 c1 c2 c3 c4 | d8 d9 ]        c has a mark at 3
    decodes           [ a17 | b5 ]                                 one call, over gathered states
    pieces            [ c0 c1 c2 ] ─► mark ─► [ c3 c4 ]            a call each, over a view of the slot
                      [ d8 d9 ]

A mixer whose steps are apart computes tokens of answers by another rule than those of prompts: see scan_step. There, a
and b are in a call each if one of them ends a prompt, and tokens of an answer are computed one by one.

Marks do not cut the row for other layers: attention computes all of a portion at once.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from kvpage.cache.state_cache import StateCache, StateKey
from kvpage.ops.cuda.uploads import upload
from kvpage.serving.model.states.mixer import PieceForward
from kvpage.serving.model.states.piece_cache import PieceCache, Slots
from kvpage.serving.model.states.row_cuts import Cut, cut, join


class StateRow(NamedTuple):
    """The positions [start, end) of one sequence, in a forward pass.

    slot: the sequence's working slot, whose state is that after `start` tokens, and becomes that after `end` tokens.
    start: with 0 there is no state before, whatever the slot's bytes are.
    marks: positions in (start, end], ascending, each with the slot that gets the state after it.
    num_prompt: how many tokens the prompt has; the model has generated the later tokens. None if all are a prompt's.
    """

    slot: int
    start: int
    end: int
    marks: Sequence[tuple[int, int]] = ()
    num_prompt: int | None = None

    @property
    def is_decode(self) -> bool:
        """Whether it is one token after a state."""
        return self.start > 0 and self.end - self.start == 1

    def is_answer(self, position: int) -> bool:
        """Return whether the token at a position was generated."""
        return self.num_prompt is not None and position >= self.num_prompt


class Piece(NamedTuple):
    """Tokens that a mixer computes in one call. snapshots: (from, to) slots, to be copied after it.

    is_answer: whether they were generated; for mixers whose steps are apart.
    """

    cut: Cut
    slots: Slots
    has_previous: bool
    snapshots: list[tuple[int, int]]
    is_answer: bool = False


class PackedStates(ABC):
    """The states of one forward pass, of which each mixer computes its own once.

    After an error in the forward pass, the states that it writes are undefined.

    states: the slots. num_tokens: of the packed row.
    """

    def __init__(self, states: StateCache, num_tokens: int) -> None:
        self._states, self._num_tokens = states, num_tokens
        self._computed: set[StateKey] = set()

    @abstractmethod
    def _pieces_of(self, forward: PieceForward) -> list[Piece]:
        """Return the calls of a mixer, which together compute the packed row."""

    def check_done(self) -> None:
        """Raise ValueError if a state was not computed: a mixer was replaced since the check at load."""
        missing = sorted(self._states.views.keys() - self._computed)
        if missing:
            raise ValueError(f"each state must be computed once in a step, {missing} were not")

    def compute(self, forward: PieceForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what a mixer gives for the packed row, and write its states.

        forward: of the mixer. args, kwargs: of the call, with the packed row; a cache among them is not used.
        Raises ValueError if the mixer has other states than at load, or its output is not of its tokens.
        """
        again = forward.mixer.keys & self._computed
        if again:
            raise ValueError(f"each state must be computed once in a step, {sorted(again)} were computed again")
        self._computed |= forward.mixer.keys
        outputs = []
        pieces = self._pieces_of(forward)
        for piece in pieces:
            cache = PieceCache(self._states.views, piece.slots, piece.has_previous)
            piece_args, named = (cut(values, self._num_tokens, piece.cut) for values in (args, kwargs))
            outputs.append(forward.compute(cache, piece_args, named, piece.is_answer))
            self._keep(forward, cache, piece)
        return join(outputs, self._num_tokens, [piece.cut for piece in pieces])

    def _keep(self, forward: PieceForward, cache: PieceCache, piece: Piece) -> None:
        keys = forward.mixer.keys
        if cache.touched != keys:
            name = type(forward.mixer.module).__name__
            raise ValueError(f"{name} must use its states {sorted(keys)}, it used {sorted(cache.touched)}")
        cache.write_back()
        for slot, mark in piece.snapshots:
            for key in keys:
                view = self._states.views[key]
                view[mark].copy_(view[slot])


class StatePass(PackedStates):
    """The states of a step: slots for its sequences, in the step's order. rows: one for each sequence.

    After an error in the forward pass, the states in the rows' slots and in their marks' slots are undefined.
    ValueError for a slot out of range or named twice, a position or a mark out of range, and marks that descend.
    """

    def __init__(self, states: StateCache, rows: Sequence[StateRow]) -> None:
        _check_rows(rows, states.num_slots)
        super().__init__(states, sum(row.end - row.start for row in rows))
        self._rows = list(rows)
        self._pieces: dict[tuple[bool, bool], list[Piece]] = {}  # by whether steps are apart, and are all that goes on

    def check(self, query_lens: Sequence[int], seq_lens: Sequence[int]) -> None:
        """Raise ValueError unless the rows are those of a step with these lengths, and nothing is computed yet."""
        of_rows = [(row.end - row.start, row.end) for row in self._rows]
        of_step = list(zip(query_lens, seq_lens, strict=True))
        if of_rows != of_step:
            raise ValueError(f"rows must have the step's tokens and lengths, {of_step}, got {of_rows}")
        if self._computed:
            raise ValueError("states must be those of one forward pass, these were computed before")

    def _pieces_of(self, forward: PieceForward) -> list[Piece]:
        """Return the calls of a mixer. A stepwise one goes on from a state one token after the other."""
        kind = is_apart, is_stepwise = forward.mixer.steps_apart, forward.is_stepwise
        if kind not in self._pieces:
            pieces = self._cut_row(is_apart)
            steps = (_tokens_of(piece) if is_stepwise or piece.is_answer else [piece] for piece in pieces)
            self._pieces[kind] = list(chain.from_iterable(steps))
        return self._pieces[kind]

    def _cut_row(self, is_apart: bool) -> Iterator[Piece]:
        """Yield the decodes, and then the pieces of all others. is_apart: answers are in pieces of their own."""
        firsts = [0, *accumulate(row.end - row.start for row in self._rows)]
        rows = list(zip(self._rows, firsts, strict=False))
        for is_answer in (True, False) if is_apart else (False,):
            decodes = [
                (row, first)
                for row, first in rows
                if row.is_decode and (is_apart and row.is_answer(row.start)) == is_answer
            ]
            if decodes:
                yield self._decodes(decodes, is_answer)
        for row, first in rows:
            if not row.is_decode:
                yield from _pieces(row, first, is_apart)

    def _decodes(self, decodes: list[tuple[StateRow, int]], is_answer: bool) -> Piece:
        slots, rows = [row.slot for row, _ in decodes], [first for _, first in decodes]
        snapshots = [(row.slot, mark) for row, _ in decodes for _, mark in row.marks]
        device = self._states.device
        return Piece(Cut(_indices(rows, device), True), _indices(slots, device), True, snapshots, is_answer)


def _pieces(row: StateRow, first: int, is_apart: bool) -> Iterator[Piece]:
    """Yield the pieces of one sequence, whose tokens begin at `first` in the packed row."""
    ends = sorted({position for position, _ in row.marks} | {row.end})
    if is_apart and row.num_prompt is not None and row.start < row.num_prompt < row.end:
        ends = sorted({*ends, row.num_prompt})
    for start, end in pairwise([row.start, *ends]):
        rows = slice(first + start - row.start, first + end - row.start)
        snapshots = [(row.slot, mark) for position, mark in row.marks if position == end]
        is_answer = is_apart and row.is_answer(start)
        yield Piece(Cut(rows, False), slice(row.slot, row.slot + 1), start > 0, snapshots, is_answer)


def _tokens_of(piece: Piece) -> Iterator[Piece]:
    """Yield the tokens of a piece that goes on from a state, one by one; any other piece as it is."""
    rows = piece.cut.rows
    if piece.cut.is_batch or not piece.has_previous or isinstance(rows, torch.Tensor):
        yield piece
        return
    for row in range(rows.start, rows.stop):
        is_last = row + 1 == rows.stop
        yield piece._replace(cut=Cut(slice(row, row + 1), False), snapshots=piece.snapshots if is_last else [])


def _indices(values: list[int], device: torch.device) -> slice | torch.Tensor:
    """Return a slice for neighbours, which costs no copy, and else a tensor on the device."""
    if values == list(range(values[0], values[0] + len(values))):
        return slice(values[0], values[0] + len(values))
    return upload([np.array(values, np.int64)], device)[0]


def _check_rows(rows: Sequence[StateRow], num_slots: int) -> None:
    if not rows:
        raise ValueError("rows must be one or more, got 0")
    for row in rows:
        if not 0 <= row.start < row.end:
            raise ValueError(f"start must be in [0, end), got start {row.start} and end {row.end}")
        _check_marks(row)
    slots = [slot for row in rows for slot in (row.slot, *(mark for _, mark in row.marks))]
    wrong = [slot for slot in slots if not 0 <= slot < num_slots]
    if wrong:
        raise ValueError(f"slots must be in [0, {num_slots}), got {wrong}")
    if len(set(slots)) < len(slots):
        raise ValueError(f"slots must be named once in a step, got {sorted(slots)}")


def _check_marks(row: StateRow) -> None:
    positions = [position for position, _ in row.marks]
    if positions != sorted(positions):
        raise ValueError(f"marks must be in ascending order, got {positions}")
    if positions and not row.start < positions[0] <= positions[-1] <= row.end:
        raise ValueError(f"marks must be in ({row.start}, {row.end}], got {positions}")


class DecodePass(PackedStates):
    """One generated token after a state, of each of several sequences. Make one for each time that it is computed.

    slots: of each sequence, int64 [num_seqs] on the states' device. Several may name a slot that nobody reads.
    """

    def __init__(self, states: StateCache, slots: torch.Tensor) -> None:
        super().__init__(states, len(slots))
        self._decodes = Piece(Cut(slice(0, len(slots)), True), slots, True, [], is_answer=True)

    def check(self, query_lens: Sequence[int], seq_lens: Sequence[int]) -> None:
        """Raise ValueError unless a step with these lengths has one token of each sequence."""
        if list(query_lens) != [1] * self._num_tokens:
            raise ValueError(f"query_lens must be 1 for each of {self._num_tokens} sequences, got {list(query_lens)}")

    def _pieces_of(self, forward: PieceForward) -> list[Piece]:
        return [self._decodes]

"""StepPlan: all that the ranks need to compute one step, each over its own caches.

    packed     [ a17 | b5 b6 | c0 ]              the tokens
    blocks     full layers       slots, tables
               each window       slots, tables
    states     [ slot of a | slot of b, mark at 6 | slot of c ]

As a message it has these parts, of which the groups' are one after the other:

    flags, token_ids, starts, ends, wanted, slots, tables, states
    flags      is_decode, then the width of each group's tables
    states     slot, num_prompt or -1, number of marks of each sequence; then position and slot of each mark
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import chain, islice
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvpage.blocks.sequence_state import Ids, Slots
from kvpage.serving.loop.ranks.message import Message, Part
from kvpage.serving.model.states.state_pass import StateRow
from kvpage.serving.model.step import PackedTokens

NUMBERS_OF_ROW = 3  # of each sequence in a message, before all marks
NO_PROMPT = -1  # stands for a num_prompt of None


class GroupBlocks(NamedTuple):
    """The blocks of one group in a step.

    slots: int64 [num_tokens]. tables: int32 [num_seqs, max_blocks].
    """

    slots: Slots
    tables: Ids


class StepPlan(NamedTuple):
    """A step without caches.

    packed: the tokens.
    blocks: of the full layers, then of each window.
    states: a row for each sequence; empty for a model without states.
    """

    packed: PackedTokens
    blocks: Sequence[GroupBlocks]
    states: Sequence[StateRow] = ()

    def parts(self) -> list[Part]:
        """Return the parts of a message."""
        token_ids, starts, ends, wanted_rows, is_decode = self.packed
        flags = np.array([is_decode, *(blocks.tables.shape[1] for blocks in self.blocks)], np.int64)
        slots = np.concatenate([blocks.slots for blocks in self.blocks])
        tables = np.concatenate([blocks.tables.reshape(-1) for blocks in self.blocks])
        starts, ends = np.asarray(starts, np.int64), np.asarray(ends, np.int64)
        return [flags, token_ids, starts, ends, wanted_rows, slots, tables, _numbers_of(self.states)]

    @classmethod
    def of_message(cls, message: Message) -> "StepPlan":
        """Return the plan that a message tells. ValueError for parts that do not fit together."""
        flags, token_ids, starts, ends, wanted_rows, slots, tables, states = message.parts
        num_tokens, num_seqs, widths = len(token_ids), len(starts), flags[1:].tolist()
        sizes = len(ends), len(slots), len(tables)
        if not widths or min(widths) < 0 or sizes != (num_seqs, len(widths) * num_tokens, num_seqs * sum(widths)):
            raise ValueError(
                f"the parts of a step must fit together, got sizes {[len(part) for part in message.parts]}"
            )
        if num_seqs == 0 or (starts >= ends).any() or (ends - starts).sum() != num_tokens:
            raise ValueError(f"a step must compute {num_tokens} tokens, got {starts.tolist()} to {ends.tolist()}")
        if len(wanted_rows) and not 0 <= wanted_rows.min() <= wanted_rows.max() < num_tokens:
            raise ValueError(f"wanted must be indices of {num_tokens} tokens, got {wanted_rows.tolist()}")
        packed = PackedTokens(token_ids, starts, ends, wanted_rows, is_decode=bool(flags[0]))
        of_groups = zip(
            slots.reshape(-1, num_tokens), np.split(tables, num_seqs * np.cumsum(widths[:-1], dtype=int)), strict=True
        )
        blocks = [GroupBlocks(slots, tables.reshape(num_seqs, -1)) for slots, tables in of_groups]
        return cls(packed, blocks, _rows_of(states, starts, ends) if len(states) else ())


class OtherRanks(Protocol):
    """The ranks that compute the other heads of the model."""

    def computing(self, plan: StepPlan) -> AbstractContextManager[None]:
        """Let the others compute the same step; inside, this rank does."""


def _numbers_of(rows: Sequence[StateRow]) -> Part:
    """Return the numbers of states in a message."""
    marks = [number for row in rows for mark in row.marks for number in mark]
    of_rows = [(row.slot, NO_PROMPT if row.num_prompt is None else row.num_prompt, len(row.marks)) for row in rows]
    return np.array([*chain.from_iterable(of_rows), *marks], np.int64)


def _rows_of(states: Part, starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> list[StateRow]:
    """Return the rows that these numbers tell. ValueError unless they are of as many sequences."""
    num_before = NUMBERS_OF_ROW * len(starts)
    slots, nums_prompt, nums_marks = (states[at:num_before:NUMBERS_OF_ROW].tolist() for at in range(NUMBERS_OF_ROW))
    if min(nums_marks, default=-1) < 0 or len(states) != num_before + 2 * sum(nums_marks):
        raise ValueError(f"states must be of {len(starts)} sequences and their marks, got {states.tolist()}")
    positions, to_slots = states[num_before::2].tolist(), states[num_before + 1 :: 2].tolist()
    marks = zip(positions, to_slots, strict=True)
    marks_of_each = [list(islice(marks, num_marks)) for num_marks in nums_marks]
    prompts = [None if num == NO_PROMPT else num for num in nums_prompt]
    columns = zip(slots, starts.tolist(), ends.tolist(), marks_of_each, prompts, strict=True)
    return [StateRow(*column) for column in columns]

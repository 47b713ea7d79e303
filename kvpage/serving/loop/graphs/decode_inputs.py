"""DecodeInputs: the arguments of a step that computes the last token of each sequence, in all groups of layers."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvpage.blocks.rows import StepInputs
from kvpage.blocks.sequence_state import Ids, Slots
from kvpage.serving.model.states.state_pass import StateRow


class DecodeInputs(NamedTuple):
    """Where each sequence's last token goes, and what it attends to.

    full: of the layers that share the manager's table. windows: the same of each window, with tables as wide.
    state_slots: int64 [num_seqs]; None without states. rows: of the sequences in the block manager, see SequenceSteps;
    None if nobody knows.
    """

    full: StepInputs
    windows: Sequence[StepInputs] = ()
    state_slots: Slots | None = None
    rows: Slots | None = None

    @property
    def num_seqs(self) -> int:
        """How many sequences there are."""
        return len(self.full.seq_lens)

    def state_rows(self) -> list[StateRow]:
        """Return the states of these tokens, all of which were generated; none without states."""
        if self.state_slots is None:
            return []
        pairs = zip(self.state_slots.tolist(), self.full.seq_lens.tolist(), strict=True)
        return [StateRow(slot, end - 1, end, num_prompt=0) for slot, end in pairs]

    @property
    def slots(self) -> list[Slots]:
        """The slots of each group with blocks, int64 [num_seqs] each."""
        return [group.slots for group in (self.full, *self.windows)]

    @property
    def tables(self) -> Ids:
        """The block tables of all groups with blocks, int32 [num_groups, num_seqs, max_blocks]."""
        if not self.windows:
            return self.full.block_tables[None]
        return np.stack([group.block_tables for group in (self.full, *self.windows)])

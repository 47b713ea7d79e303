"""StaticInputs: the inputs of decode steps at addresses that never change, so that captured steps find them.

                   4 sequences in a step of 8 rows
    token_ids    [ 17   -1   5   -1  | 0   0   0   0 ]     -1: the newest token, which is still on the device
    positions    [ 9    4    12  6   | 0   0   0   0 ]
    seq_lens     [ 10   5    13  7   | 0   0   0   0 ]     padding reads no block
    state_slots  [ 3    0    1   2   | 9   9   9   9 ]     and computes with a state slot that nobody else has
    slots        [ 41   8    77  30  | -1  -1  -1  -1 ]    and is written nowhere
    plan         [ 128  0  128  0    | 0   0   0   0 ]     keys that sequences share: see kvpage.layout.shared_prefixes
    tables       [ 10 .. ] [ 2 .. ]  | rows of earlier steps, which nobody reads

Each group of layers with blocks of its own has slots, tables and a plan: the full layers first, then each window. One
upload a step brings all of it.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvpage.layout.shared_prefixes import PlanRow
from kvpage.ops.cuda.uploads import upload
from kvpage.serving.loop.graphs.decode_inputs import DecodeInputs
from kvpage.serving.loop.graphs.kept_plan import KeptPlan

PAD_SLOT = -1
NEWEST = -1
"""Stands for a token id that the host does not know yet."""
PAD_PLAN = [0, -1, -1, *[0] * (len(PlanRow) - 3)]
"""Of sequences, and of groups, in a plan: nothing is shared."""
_NUM_SINGLE = 4  # columns before the slots of the groups


class DecodeViews(NamedTuple):
    """The inputs of a step of some rows, as views of the static memory; see the picture.

    slots: int64 [num_groups, num_rows]. tables: int32 [num_groups, num_rows, num_blocks]. plans: int64 [num_groups, 9,
    num_rows], or 0 where none is made. All others: int64 [num_rows].
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    seq_lens: torch.Tensor
    state_slots: torch.Tensor
    slots: torch.Tensor
    tables: torch.Tensor
    newest_tokens: torch.Tensor
    plans: torch.Tensor


class StaticInputs:
    """Static memory on `device` for up to `num_rows` sequences of up to `num_blocks` blocks.

    num_blocks: 0 where no layer attends; no table is sent then. num_groups: of layers with blocks.
    pad_len: the length of padding; 1 has it attend to a token that does not matter. pad_state: its state slot.
    block_size: tokens of a block, where plans of shared prefixes are made; None for no plan.
    newest_tokens: int64 [num_rows], the tokens that the last step chose; -1 for logits that are no numbers.
    """

    def __init__(
        self,
        num_rows: int,
        num_blocks: int,
        device: torch.device,
        pad_len: int = 0,
        *,
        num_groups: int = 1,
        pad_state: int = 0,
        block_size: int | None = None,
    ) -> None:
        self._device, self._num_groups = device, num_groups
        self._plans = [] if block_size is None else [KeptPlan(block_size) for _ in range(num_groups)]
        self._padding = [0, 0, pad_len, pad_state, *[PAD_SLOT] * num_groups, *PAD_PLAN * len(self._plans)]
        self._columns = torch.zeros(len(self._padding), num_rows, dtype=torch.int64, device=device)
        self._tables = torch.zeros(num_groups, num_rows, num_blocks, dtype=torch.int32, device=device)
        self.newest_tokens = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.clear()

    @property
    def num_bytes(self) -> int:
        """The memory of all."""
        parts = self._columns, self._tables, self.newest_tokens
        return sum(part.numel() * part.element_size() for part in parts)

    def clear(self) -> None:
        """Make all rows padding."""
        for column, number in zip(self._columns, self._padding, strict=True):
            column.fill_(number)

    def views(self, num_rows: int) -> DecodeViews:
        """Return the first rows."""
        columns, tables = self._columns[:, :num_rows], self._tables[:, :num_rows]
        token_ids, positions, seq_lens, state_slots = columns[:_NUM_SINGLE]
        first_plan = _NUM_SINGLE + self._num_groups
        slots, plans = columns[_NUM_SINGLE:first_plan], columns[first_plan:]
        of_groups = plans.view(self._num_groups, len(plans) // self._num_groups, num_rows)
        newest_tokens = self.newest_tokens[:num_rows]
        return DecodeViews(token_ids, positions, seq_lens, state_slots, slots, tables, newest_tokens, of_groups)

    def keep_newest(self, tokens: torch.Tensor) -> None:
        """Take tokens on the device as the newest ones, those of the first rows; nothing is copied if they are."""
        if tokens.data_ptr() != self.newest_tokens.data_ptr():
            self.newest_tokens[: len(tokens)].copy_(tokens)

    def fill(self, num_rows: int, inputs: DecodeInputs, token_ids: npt.NDArray[np.int32] | None) -> None:
        """Set the inputs of a step of num_rows rows, padding after those of the sequences.

        token_ids: of each sequence; None for the newest tokens, those that the last step chose row by row.
        """
        columns = self._columns_of(num_rows, inputs, token_ids)
        has_tables = self._tables.shape[2] > 0
        sent, *all_tables = upload([columns, inputs.tables] if has_tables else [columns], self._device)
        self._columns[:, :num_rows].copy_(sent)
        for tables in all_tables:
            self._tables[:, : tables.shape[1], : tables.shape[2]].copy_(tables)

    def _columns_of(
        self, num_rows: int, inputs: DecodeInputs, token_ids: npt.NDArray[np.int32] | None
    ) -> npt.NDArray[np.int64]:
        num_seqs, seq_lens = inputs.num_seqs, inputs.full.seq_lens
        columns = np.array(self._padding, np.int64)[:, None].repeat(num_rows, axis=1)
        columns[0, :num_seqs] = NEWEST if token_ids is None else token_ids
        columns[1, :num_seqs] = seq_lens - 1
        columns[2, :num_seqs] = seq_lens
        if inputs.state_slots is not None:
            columns[3, :num_seqs] = inputs.state_slots
        first_plan = _NUM_SINGLE + self._num_groups
        columns[_NUM_SINGLE:first_plan, :num_seqs] = inputs.slots
        plans = columns[first_plan:].reshape(-1, len(PlanRow), num_rows)
        for kept_plan, plan, group in zip(self._plans, plans, (inputs.full, *inputs.windows), strict=False):
            kept_plan.write(plan, group, inputs.rows)
        return columns

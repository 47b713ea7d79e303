"""StaticInputs: the inputs of decode steps at addresses that never change, so that captured steps find them.

                   4 sequences in a step of 8 rows
    token_ids    [ 17   -1   5   -1  | 0   0   0   0 ]     -1: the newest token, which is still on the device
    positions    [ 9    4    12  6   | 0   0   0   0 ]
    slots        [ 41   8    77  30  | -1  -1  -1  -1 ]    padding is written nowhere
    seq_lens     [ 10   5    13  7   | 0   0   0   0 ]     and reads no block
    tables       [ 10 .. ] [ 2 .. ]  | rows of earlier steps, which nobody reads

One upload a step brings all of it.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvpage.blocks.rows import StepInputs
from kvpage.ops.cuda.uploads import upload

PAD_SLOT = -1
NEWEST = -1
"""Stands for a token id that the host does not know yet."""


class DecodeViews(NamedTuple):
    """The inputs of a step of so many rows, as views of the static memory; see the picture."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    seq_lens: torch.Tensor
    tables: torch.Tensor
    newest_tokens: torch.Tensor


class StaticInputs:
    """Static memory on `device` for up to `num_rows` sequences of up to `num_blocks` blocks.

    pad_len: the length of padding; 1 has it attend to a token that does not matter.
    newest_tokens: int64 [num_rows], the tokens that the last step chose; -1 for logits that are no numbers.
    """

    def __init__(self, num_rows: int, num_blocks: int, device: torch.device, pad_len: int = 0) -> None:
        self._device, self._pad_len = device, pad_len
        self._columns = torch.zeros(4, num_rows, dtype=torch.int64, device=device)
        self._tables = torch.zeros(num_rows, num_blocks, dtype=torch.int32, device=device)
        self.newest_tokens = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.clear()

    @property
    def num_bytes(self) -> int:
        """The memory of all."""
        parts = self._columns, self._tables, self.newest_tokens
        return sum(part.numel() * part.element_size() for part in parts)

    def clear(self) -> None:
        """Make all rows padding."""
        self._columns.zero_()
        self._columns[2].fill_(PAD_SLOT)
        self._columns[3].fill_(self._pad_len)

    def views(self, num_rows: int) -> DecodeViews:
        """Return the first rows."""
        token_ids, positions, slots, seq_lens = self._columns[:, :num_rows].unbind()
        newest_tokens = self.newest_tokens[:num_rows]
        return DecodeViews(token_ids, positions, slots, seq_lens, self._tables[:num_rows], newest_tokens)

    def keep_newest(self, tokens: torch.Tensor) -> None:
        """Take tokens on the device as the newest ones, those of the first rows; nothing is copied if they are."""
        if tokens.data_ptr() != self.newest_tokens.data_ptr():
            self.newest_tokens[: len(tokens)].copy_(tokens)

    def fill(self, num_rows: int, inputs: StepInputs, token_ids: npt.NDArray[np.int32] | None) -> None:
        """Set the inputs of a step of so many rows, padding after those of the sequences.

        token_ids: of each sequence; None for the newest tokens, those that the last step chose row by row.
        """
        columns = self._columns_of(num_rows, inputs, token_ids)
        sent, tables = upload([columns, inputs.block_tables], self._device)
        self._columns[:, :num_rows].copy_(sent)
        self._tables[: len(tables), : tables.shape[1]].copy_(tables)

    def _columns_of(
        self, num_rows: int, inputs: StepInputs, token_ids: npt.NDArray[np.int32] | None
    ) -> npt.NDArray[np.int64]:
        num_seqs = len(inputs.seq_lens)
        columns = np.zeros((4, num_rows), np.int64)
        columns[2, num_seqs:], columns[3, num_seqs:] = PAD_SLOT, self._pad_len
        columns[0, :num_seqs] = NEWEST if token_ids is None else token_ids
        columns[1, :num_seqs] = inputs.seq_lens - 1
        columns[2, :num_seqs] = inputs.slots
        columns[3, :num_seqs] = inputs.seq_lens
        return columns

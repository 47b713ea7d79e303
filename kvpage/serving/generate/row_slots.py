"""RowSlots: the places in blocks of the tokens of a batch's rows."""

from typing import NamedTuple

import torch


class RowSlots(NamedTuple):
    """The slots that a forward writes, and the block tables that it reads, on the cache's device.

    slot_mapping: int64 [num_rows * num_new_tokens], row by row; -1 where the block holds the token already.
    block_tables: int32 [num_rows, max_blocks].
    start, end: the forward computes the rows' tokens [start, end).
    """

    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    start: int
    end: int

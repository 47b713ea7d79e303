"""RowSlots: where the tokens of a batch's rows lie in blocks."""

from typing import NamedTuple

import torch


class RowSlots(NamedTuple):
    """Where a step writes and reads, on the cache's device.

    slot_mapping: int64 [num_rows * num_new_tokens], one row after the other; -1 for what is in the blocks already.
    block_tables: int32 [num_rows, max_blocks].
    start, end: the step's tokens are the rows' [start, end).
    """

    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    start: int
    end: int

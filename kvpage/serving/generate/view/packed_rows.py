"""PackedRows: the new tokens of a cache's rows as one step of a runner on a CPU, and its logits as rows again.

row 0   [ .  .  .  . | a4 a5 a6 ]                       tokens [4, 7) of each row
row 1   [ -  -  -  - | -  b0 b1 ]    ─►  [ a4 a5 a6 | b0 b1 ]    a pad is not computed, and its logits are zeros
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from kvpage.cache.cache_engine import CacheEngine
from kvpage.serving.generate.cached_rows import TokenRows
from kvpage.serving.generate.row_slots import RowSlots
from kvpage.serving.generate.states.row_states import PackedPass
from kvpage.serving.model.step import PackedTokens, Step


class PackedRows(NamedTuple):
    """packed: the tokens of the rows that have some. rows: the numbers of these. counts: of the logits of each."""

    packed: PackedTokens
    rows: list[int]
    counts: list[int]

    @classmethod
    def of(cls, tokens: TokenRows, start: int, pads: Sequence[int], num_logits: int) -> "PackedRows":
        """Return the tokens [num_rows, num_tokens] at `start`, of rows with pads. The last logits are wanted."""
        num_tokens = tokens.shape[1]
        new = [min(max(start + num_tokens - num_pads, 0), num_tokens) for num_pads in pads]
        rows = [row for row, count in enumerate(new) if count]
        lens = [new[row] for row in rows]
        ends = [start + num_tokens - pads[row] for row in rows]
        counts = [min(num_logits, length) for length in lens]
        after = np.cumsum([0, *lens])[1:]
        last = [np.arange(end - count, end) for end, count in zip(after, counts, strict=True)]
        empty = np.empty(0, np.int32)
        packed = PackedTokens(
            np.concatenate([empty, *(tokens[row, num_tokens - new[row] :] for row in rows)]),
            [end - length for end, length in zip(ends, lens, strict=True)],
            ends,
            np.concatenate([np.empty(0, np.int64), *last]),
        )
        return cls(packed, rows, counts)

    def step(self, engine: CacheEngine, slots: RowSlots, states: PackedPass | None) -> Step:
        """Return the step that computes them. slots, states: of all rows."""
        tables = slots.block_tables.numpy()[self.rows]
        step = Step.make(engine, slots.slot_mapping.numpy(), tables, self.packed.starts, self.packed.ends)
        step.use_states(None if states is None else states.of_step(self.rows))
        return step

    def unpacked(self, logits: torch.Tensor, num_rows: int, num_logits: int) -> torch.Tensor:
        """Return the logits [sum of counts, vocab_size] as [num_rows, num_logits, vocab_size]; those of pads are 0."""
        if len(logits) == num_rows * num_logits:
            return logits.view(num_rows, num_logits, -1)
        out = logits.new_zeros((num_rows, num_logits, logits.shape[1]))
        for row, part in zip(self.rows, torch.split(logits, self.counts), strict=True):
            out[row, num_logits - len(part) :] = part
        return out

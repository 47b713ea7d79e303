"""KeptPlan: the plan of shared prefixes for the decodes of captured steps, kept while it fits.

It fits as long as the same sequences decode, and the first member of each group has the blocks that the group reads.
What the others share with it stays the same: tokens that are written never change.
"""

import numpy as np
import numpy.typing as npt

from kvpage.blocks.rows import StepInputs
from kvpage.blocks.sequences.sequences import Rows
from kvpage.layout.shared_prefixes import PlanRow
from kvpage.ops.shared_prefixes import plan_into


class KeptPlan:
    """The last plan for one group of layers with blocks of `block_size` tokens. num_made: plans so far."""

    def __init__(self, block_size: int) -> None:
        self._block_size, self.num_made = block_size, 0
        self._rows: Rows | None = None
        self._plan = np.zeros((len(PlanRow), 0), np.int64)
        self._leaders = np.zeros(0, np.int64)
        self._blocks = np.zeros((0, 0), np.int32)

    def write(self, plan: npt.NDArray[np.int64], inputs: StepInputs, rows: Rows | None) -> None:
        """Write a plan for a step.

        plan: int64 [9, num_rows], written whole. rows: what the block manager calls the step's sequences; None if
        nobody knows, and then the plan is made anew.
        """
        if not self._fits(plan.shape[1], inputs.block_tables, rows):
            self._make(plan.shape[1], inputs)
            self._rows = rows
        plan[:] = self._plan

    def _fits(self, num_rows: int, tables: npt.NDArray[np.int32], rows: Rows | None) -> bool:
        if rows is None or self._rows is None or num_rows != self._plan.shape[1]:
            return False
        is_same = np.array_equal(rows, self._rows) and self._blocks.shape[1] <= tables.shape[1]
        return is_same and np.array_equal(tables[self._leaders, : self._blocks.shape[1]], self._blocks)

    def _make(self, num_rows: int, inputs: StepInputs) -> None:
        self.num_made += 1
        self._plan = np.empty((len(PlanRow), num_rows), np.int64)
        tables = np.ascontiguousarray(inputs.block_tables)
        count = plan_into(self._plan, tables, inputs.seq_lens, self._block_size)
        self._leaders = self._plan[PlanRow.ORDER, self._plan[PlanRow.GROUP_FIRST, :count]]
        width = -(-self._plan[PlanRow.KEY_END].max(initial=0) // self._block_size)
        self._blocks = tables[self._leaders, :width].copy()

"""BatchRunner: a batch's items through the model, over the blocks that the manager has given them.

items ─► due moves of blocks ─► Step: slots, block tables ─► ModelRunner.forward ─► logits of the wanted tokens
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvpage.blocks.manager import BlockManager
from kvpage.cache.cache_engine import CacheEngine
from kvpage.serving.blending.blend_pass import BlendCounts
from kvpage.serving.blending.blender import Blender
from kvpage.serving.loop.block_transfers import BlockTransfers
from kvpage.serving.model.runner import ModelRunner, PackedTokens
from kvpage.serving.model.step import BatchItem, Step


class Computed(NamedTuple):
    """The result of a forward pass.

    logits: of the wanted tokens, [their number, vocab_size]. blended: of each item; empty if none reuses anything.
    """

    logits: torch.Tensor
    blended: list[BlendCounts]


class BatchRunner:
    """One model over one cache, whose blocks `manager` gives out. num_passes, num_computed_tokens: so far."""

    def __init__(
        self, runner: ModelRunner, cache: CacheEngine, manager: BlockManager, transfers: BlockTransfers
    ) -> None:
        self.num_passes = self.num_computed_tokens = 0
        self._runner, self._cache, self._manager, self._transfers = runner, cache, manager, transfers

    def check(self) -> None:
        """ValueError if the model cannot compute anything now, see ModelRunner."""
        self._runner.check()

    def run(self, items: Sequence[BatchItem], blender: Blender | None = None) -> Computed:
        """Compute one forward pass. Exceptions of the model come through.

        blender: for items that reuse segments; None if there are none.
        """
        self._transfers.run()
        ids, token_ids, starts, ends, wanted, reuses = (list(column) for column in zip(*items, strict=True))
        slots, tables = self._manager.slot_mappings(ids, starts, ends), self._manager.block_tables(ids)
        step = Step.make(self._cache, slots, tables, starts, ends)
        packed = PackedTokens(np.concatenate(token_ids), starts, ends, _rows_of(token_ids, wanted))
        blended: list[BlendCounts] = []
        if any(reuses):
            assert blender is not None, "a request is admitted with reused segments only where there is a blender"
            blend = blender.begin(step, items)
            logits = self._runner.forward(packed, replace(step, blend=blend))
            blended = blend.counts()
        else:
            logits = self._runner.forward(packed, step)
        self.num_passes += 1
        self.num_computed_tokens += len(packed.token_ids) - sum(counts.num_reused for counts in blended)
        return Computed(logits, blended)


def _rows_of(token_ids: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]]) -> npt.NDArray[np.int64]:
    """Return the rows of the pass for the wanted indices of each item."""
    first_rows = np.cumsum([0, *(len(tokens) for tokens in token_ids)])
    rows = [first + index for first, indices in zip(first_rows, wanted, strict=False) for index in indices]
    return np.array(rows, np.int64)

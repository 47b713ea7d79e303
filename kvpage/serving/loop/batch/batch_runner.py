"""BatchRunner: a batch's items through the model, over the blocks that the manager has given them.

items ─► due moves of blocks ─► Step: slots, block tables ─► ModelRunner.forward ─► logits of the wanted tokens
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvpage.blocks.manager import BlockManager
from kvpage.blocks.states import Ids, Slots
from kvpage.cache.cache_engine import CacheEngine
from kvpage.serving.blending.blend_pass import BlendCounts
from kvpage.serving.blending.blender import Blender
from kvpage.serving.loop.batch.batch import Batch
from kvpage.serving.loop.block_transfers import BlockTransfers
from kvpage.serving.model.runner import ModelRunner, PackedTokens
from kvpage.serving.model.step import BatchItem, Step

Rows = npt.NDArray[np.int64]


class Computed(NamedTuple):
    """The result of a forward pass.

    logits: of the wanted tokens, [their number, vocab_size]. blended: of each item; empty if none reuses anything.
    """

    logits: torch.Tensor
    blended: list[BlendCounts]


class OtherRanks(Protocol):
    """The ranks that compute the other heads of the model."""

    def computing(
        self, packed: PackedTokens, slots: npt.NDArray[np.int64], tables: npt.NDArray[np.int32]
    ) -> AbstractContextManager[None]:
        """Let the others compute the same step; inside, this rank does."""


class BatchRunner:
    """One model over one cache, whose blocks `manager` gives out. num_passes, num_computed_tokens: so far.

    others: the ranks that compute with this one; None where it has the whole model.
    """

    def __init__(
        self,
        runner: ModelRunner,
        cache: CacheEngine,
        manager: BlockManager,
        transfers: BlockTransfers,
        others: OtherRanks | None = None,
    ) -> None:
        self.num_passes = self.num_computed_tokens = 0
        self._others = others
        self._runner, self._cache, self._manager, self._transfers = runner, cache, manager, transfers

    def check(self) -> None:
        """ValueError if the model cannot compute anything now, see ModelRunner."""
        self._runner.check()

    def compute(self, batch: Batch) -> torch.Tensor:
        """Compute one forward pass; return the logits of each last token. Exceptions of the model come through."""
        if not batch.prefills:
            self._transfers.run()
            inputs = self._manager.rows.inputs(batch.decodes.rows)
            return self._forward(Step.of_newest(self._cache, inputs), batch.packed(), inputs.slots, inputs.block_tables)
        rows = self._manager.rows.of([portion.request.seq_id for portion in batch.prefills])
        return self._compute(np.concatenate([batch.decodes.rows, rows]), batch.packed())

    def run(self, items: Sequence[BatchItem], blender: Blender | None = None) -> Computed:
        """Compute one forward pass over any sequences, as `compute`; return the logits of the wanted tokens.

        blender: for items that reuse segments; None if there are none.
        """
        rows, packed = self._manager.rows.of([item.seq_id for item in items]), _packed(items)
        if not any(item.reuse for item in items):
            return Computed(self._compute(rows, packed), [])
        assert blender is not None, "a request is admitted with reused segments only where there is a blender"
        step = Step.make(self._cache, *self._places(rows, packed), packed.starts, packed.ends)
        blend = blender.begin(step, items)
        logits = self._runner.forward(packed, replace(step, blend=blend))
        blended = blend.counts()
        self._count(len(packed.token_ids) - sum(counts.num_reused for counts in blended))
        return Computed(logits, blended)

    def _compute(self, rows: Rows, packed: PackedTokens) -> torch.Tensor:
        slots, tables = self._places(rows, packed)
        step = Step.make(self._cache, slots, tables, packed.starts, packed.ends)
        return self._forward(step, packed, slots, tables)

    def _forward(self, step: Step, packed: PackedTokens, slots: Slots, tables: Ids) -> torch.Tensor:
        if self._others is None:
            logits = self._runner.forward(packed, step)
        else:
            self._runner.check()
            with self._others.computing(packed, slots, tables):
                logits = self._runner.forward(packed, step)
        self._count(len(packed.token_ids))
        return logits

    def _places(self, rows: Rows, packed: PackedTokens) -> tuple[Slots, Ids]:
        """Return slots and block tables, once the due moves of blocks are done. rows: see SequenceSteps."""
        self._transfers.run()
        return self._manager.rows.slots(rows, packed.starts, packed.ends), self._manager.rows.tables(rows)

    def _count(self, num_tokens: int) -> None:
        self.num_passes += 1
        self.num_computed_tokens += num_tokens


def _packed(items: Sequence[BatchItem]) -> PackedTokens:
    """Return the tokens of the items in one row."""
    starts, ends = (np.array(column, np.int64) for column in ([i.start for i in items], [i.end for i in items]))
    first_rows = np.cumsum(ends - starts) - (ends - starts)
    wanted = [first + index for first, item in zip(first_rows.tolist(), items, strict=True) for index in item.wanted]
    tokens = np.concatenate([item.token_ids for item in items])
    return PackedTokens(tokens, starts, ends, np.array(wanted, np.int64))

"""BatchRunner: a batch's items through the model, over the blocks that the manager has given them.

items ─► due moves of blocks ─► Step: slots, block tables ─► ModelRunner.forward ─► logits of the wanted tokens
"""

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
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

    def compute(self, seq_ids: Sequence[Hashable], packed: PackedTokens) -> torch.Tensor:
        """Compute one forward pass; return the wanted logits. Exceptions of the model come through."""
        logits = self._runner.forward(packed, self._step(seq_ids, packed))
        self._count(len(packed.token_ids))
        return logits

    def run(self, items: Sequence[BatchItem], blender: Blender | None = None) -> Computed:
        """Compute one forward pass, as `compute`.

        blender: for items that reuse segments; None if there are none.
        """
        seq_ids, packed = _packed(items)
        if not any(item.reuse for item in items):
            return Computed(self.compute(seq_ids, packed), [])
        assert blender is not None, "a request is admitted with reused segments only where there is a blender"
        step = self._step(seq_ids, packed)
        blend = blender.begin(step, items)
        logits = self._runner.forward(packed, replace(step, blend=blend))
        blended = blend.counts()
        self._count(len(packed.token_ids) - sum(counts.num_reused for counts in blended))
        return Computed(logits, blended)

    def _step(self, seq_ids: Sequence[Hashable], packed: PackedTokens) -> Step:
        """Return the arguments of attention, once the due moves of blocks are done."""
        self._transfers.run()
        slots = self._manager.slot_mappings(seq_ids, packed.starts, packed.ends)
        return Step.make(self._cache, slots, self._manager.block_tables(seq_ids), packed.starts, packed.ends)

    def _count(self, num_tokens: int) -> None:
        self.num_passes += 1
        self.num_computed_tokens += num_tokens


def _packed(items: Sequence[BatchItem]) -> tuple[list[Hashable], PackedTokens]:
    """Return the sequences of the items, and their tokens in one row."""
    starts, ends = (np.array(column, np.int64) for column in ([i.start for i in items], [i.end for i in items]))
    first_rows = np.cumsum(ends - starts) - (ends - starts)
    wanted = [first + index for first, item in zip(first_rows.tolist(), items, strict=True) for index in item.wanted]
    tokens = np.concatenate([item.token_ids for item in items])
    return [item.seq_id for item in items], PackedTokens(tokens, starts, ends, np.array(wanted, np.int64))

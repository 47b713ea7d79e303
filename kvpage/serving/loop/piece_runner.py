"""PieceRunner: pieces of sequences through the model, over the blocks that the manager has given them.

pieces ─► due moves of blocks ─► Step: slots, block tables ─► ModelRunner.forward ─► logits of the wanted tokens
"""

import time
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from kvpage.blocks.manager import BlockManager
from kvpage.blocks.moves import BlockMove, Kind
from kvpage.cache.cache_engine import CacheEngine
from kvpage.serving.blending.blend_pass import BlendCounts, BlendPass
from kvpage.serving.blending.blender import Blender
from kvpage.serving.loop.transfer_meter import TransferMeter
from kvpage.serving.model.runner import ModelRunner, PackedTokens
from kvpage.serving.model.step import Piece, Step


class Computed(NamedTuple):
    """logits: of the wanted tokens, [their number, vocab_size]. blended: of each piece; empty if none reuses any."""

    logits: torch.Tensor
    blended: list[BlendCounts]


class PieceRunner:
    """One model over one cache, whose blocks `manager` gives out.

    blender: for pieces that reuse something; None while none may. num_passes, num_computed_tokens: so far.
    """

    def __init__(self, runner: ModelRunner, cache: CacheEngine, manager: BlockManager) -> None:
        self.blender: Blender | None = None
        self.meter = TransferMeter(cache)
        self.num_passes = self.num_computed_tokens = 0
        self._runner, self._cache, self._manager = runner, cache, manager

    def check(self) -> None:
        """ValueError if the model cannot compute anything now, see ModelRunner."""
        self._runner.check()

    def run(self, pieces: Sequence[Piece]) -> Computed:
        """One forward pass. Whatever the model raises comes through."""
        self.move_blocks()
        ids, token_ids, starts, ends, wanted, _ = (list(column) for column in zip(*pieces, strict=True))
        first_rows = np.cumsum([0, *(len(tokens) for tokens in token_ids)])
        rows = [first + index for first, indices in zip(first_rows, wanted, strict=False) for index in indices]
        slots, tables = self._manager.slot_mappings(ids, starts, ends), self._manager.block_tables(ids)
        step = Step.make(self._cache, slots, tables, starts, ends)
        packed = PackedTokens(np.concatenate(token_ids), starts, ends, np.array(rows, np.int64))
        blend = self._begin_blend(step, pieces)
        logits = self._runner.forward(packed, step)
        blended = blend.counts() if blend else []
        self.num_passes += 1
        self.num_computed_tokens += len(packed.token_ids) - sum(counts.num_reused for counts in blended)
        return Computed(logits, blended)

    def move_blocks(self) -> None:
        """Does what the manager has gathered: copies, and swaps between the tiers. What fails is done again the next
        time, before anything else is written.
        """
        rule, begin, done = self._manager.space.rule, time.monotonic(), Counter[Kind]()

        def move(one: BlockMove) -> None:
            self.meter.move(one)
            done[one.kind] += len(one.pairs)

        self._manager.do_moves(move)
        if rule and self._cache.device.type == "cpu" and done["swap_in"]:
            rule.saw_transfer(done.total() * rule.block_bytes, time.monotonic() - begin)

    def _begin_blend(self, step: Step, pieces: Sequence[Piece]) -> BlendPass | None:
        if not any(piece.reuse for piece in pieces):
            return None
        assert self.blender is not None
        step.blend = blend = self.blender.begin(step, pieces)
        return blend

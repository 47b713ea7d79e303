"""BatchRunner: a batch's items through the model, over the blocks that the manager has given them.

items ─► due moves of blocks ─► Step: slots, block tables ─► ModelRunner.forward ─► logits of the wanted tokens
"""

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvpage.blocks.manager import BlockManager
from kvpage.cache.layered_moves import Arrival
from kvpage.ops.cuda.error_reports import ErrorReports
from kvpage.serving.blending.blend_pass import BlendCounts
from kvpage.serving.blending.blender import Blender
from kvpage.serving.loop.batch.batch import Batch, Choose, Decodes
from kvpage.serving.loop.batch.step_groups import StepGroups
from kvpage.serving.loop.graphs.decode_graphs import DecodeGraphs, Replayed
from kvpage.serving.loop.graphs.decode_inputs import DecodeInputs
from kvpage.serving.loop.moves.block_transfers import BlockTransfers
from kvpage.serving.loop.ranks.rank_caches import RankCaches
from kvpage.serving.loop.ranks.step_plan import GroupBlocks, OtherRanks, StepPlan
from kvpage.serving.loop.request import Request
from kvpage.serving.model.runner import NOTHING, ModelRunner
from kvpage.serving.model.step import BatchItem, ModelInputs, PackedTokens, Step
from kvpage.serving.sampling.logits_check import likeliest

Rows = npt.NDArray[np.int64]


class Computed(NamedTuple):
    """The result of a forward pass.

    logits: of the wanted tokens, [their number, vocab_size]. blended: of each item; empty if none reuses anything.
    """

    logits: torch.Tensor
    blended: list[BlendCounts]


class BatchRunner:
    """One model over the caches of one rank, whose blocks `manager` gives out. num_passes, num_computed_tokens: so far.

    others: the ranks that compute with this one; None where it has the whole model.
    groups: what windows with blocks of their own, and states, give to a step; None where all layers share one table.
    """

    def __init__(
        self,
        runner: ModelRunner,
        caches: RankCaches,
        manager: BlockManager,
        transfers: BlockTransfers,
        others: OtherRanks | None = None,
        groups: StepGroups | None = None,
    ) -> None:
        self.num_passes = self.num_computed_tokens = 0
        self._groups = groups if groups else None
        self._others = others
        self._runner, self._caches, self._manager, self._transfers = runner, caches, manager, transfers
        self._cache = caches.full
        self.graphs: DecodeGraphs | None = None
        self._reports = ErrorReports(self._cache.device)

    def check(self) -> None:
        """ValueError if the model cannot compute anything now, see ModelRunner."""
        self._runner.check()

    def use_graphs(self, graphs: DecodeGraphs | None) -> None:
        """Replay captured decode steps from now on, where there is one; None for never."""
        self.graphs = graphs

    def check_kernels(self) -> None:
        """ValueError if kernels of a pass met a bad id. Nothing waits: call it once the pass's tokens are known."""
        self._reports.check()

    def check_all_kernels(self) -> None:
        """ValueError if kernels of the passes so far met a bad id. It waits for them."""
        self._reports.check_all()

    def compute(self, batch: Batch, written: Callable[[int], object] | None = None) -> torch.Tensor:
        """Compute one forward pass; return the logits of each last token. Exceptions of the model come through.

        The logits are valid until the next pass. written: called with each layer, when its K and V are written; only
        for models whose layers share one table.
        """
        packed = batch.packed()
        with self._adapting(batch.requests, packed):
            if not batch.prefills:
                inputs = self._decode_inputs(batch.decodes)
                if (replayed := self._replay(inputs, packed.token_ids)) is not None:
                    return replayed.logits
                return self._forward(self._newest(inputs, packed), packed, self._plan_of(inputs, packed))
            if self.graphs is not None and len(batch.decodes):
                self.graphs.miss("prompts are computed beside it")
            if self._groups is not None:
                nums_prompt = [request.num_prompt_tokens for request in batch.requests]
                seq_ids = [request.seq_id for request in batch.requests]
                return self._of_groups(seq_ids, packed, len(batch.decodes), nums_prompt)
            rows = self._manager.rows.of([portion.request.seq_id for portion in batch.prefills])
            step, plan = self._begin(np.concatenate([batch.decodes.rows, rows]), packed)
            step.tell(written)
            return self._forward(step, packed, plan)

    def _adapting(
        self, requests: Sequence[Request], packed: PackedTokens | None = None
    ) -> AbstractContextManager[object]:
        """Return a context in which rows have the adapters of requests. packed: their tokens; None for one each."""
        if not self._runner.has_adapters or not any(adapters := [request.adapter for request in requests]):
            return NOTHING
        if packed is None:
            counts = np.ones(len(adapters), np.int64)
        else:
            counts = np.asarray(packed.ends, np.int64) - np.asarray(packed.starts, np.int64)
        return self._runner.adapted.over(adapters, counts, self._cache.device)

    def _replay(self, inputs: DecodeInputs, token_ids: npt.NDArray[np.int32] | torch.Tensor) -> Replayed | None:
        """Return what a captured step computes; None where there is none. They have the base model alone."""
        if self.graphs is None:
            return None
        if self._runner.adapted.groups:
            self.graphs.miss("adapters are computed in it")
            return None
        replayed = self.graphs.run(inputs, token_ids)
        if replayed is not None:
            self._count(inputs.num_seqs)
        return replayed

    def _of_groups(
        self, seq_ids: Sequence[Hashable], packed: PackedTokens, num_decodes: int, nums_prompt: Sequence[int | None]
    ) -> torch.Tensor:
        """Compute a forward pass over all groups.

        num_decodes: of the first sequences, which have no marks. nums_prompt: see StateRow.
        """
        starts, ends = (np.asarray(column).tolist() for column in (packed.starts, packed.ends))
        assert self._groups is not None, "it is called where there are groups"
        rows = self._groups.rows(seq_ids, starts, ends, num_decodes, nums_prompt)
        arrival = self._transfers.start()
        full = self._full_blocks(self._manager.rows.of(seq_ids), packed)
        plan = StepPlan(packed, [full, *self._groups.blocks(seq_ids, starts, ends)], rows)
        return self._forward(self._step(plan, arrival), packed, plan)

    def decode(
        self, decodes: Decodes, token_ids: npt.NDArray[np.int32] | torch.Tensor, choose: Choose | None = None
    ) -> torch.Tensor:
        """Compute the last token of each sequence, and choose the next one. Nothing is waited for.

        token_ids: the tokens to compute, those of an earlier call on the device or others of the host. choose: the
            choice; None for the likeliest tokens.

        Returns the chosen tokens on the device, int32 or int64 [len(decodes)]; -1 where logits are no numbers. They are
        valid until the next pass.
        """
        inputs = self._decode_inputs(decodes)
        with self._adapting(decodes.requests):
            if (replayed := self._replay(inputs, token_ids)) is not None:
                return replayed.tokens if choose is None else choose(replayed.logits)
            logits = self._of_tokens(inputs, token_ids)
        return likeliest(logits) if choose is None else choose(logits)

    def _decode_inputs(self, decodes: Decodes) -> DecodeInputs:
        """Return the arguments of a step of decodes, before which all that it reads is in blocks and in state slots."""
        if self._groups is not None:
            self._groups.do_moves()
        self._transfers.run()
        full = self._manager.rows.inputs(decodes.rows)
        self._transfers.expected.wait(full.block_tables)
        if self._groups is None:
            return DecodeInputs(full, rows=decodes.rows)
        return self._groups.decodes(decodes.seq_ids, full)._replace(rows=decodes.rows)

    def _of_tokens(self, inputs: DecodeInputs, token_ids: npt.NDArray[np.int32] | torch.Tensor) -> torch.Tensor:
        """Return the logits of a step without a capture; see `decode`."""
        num_seqs, ends = inputs.num_seqs, inputs.full.seq_lens
        if isinstance(token_ids, torch.Tensor):
            step = self._newest(inputs)
            known = token_ids.clamp(min=0).to(torch.int64).unsqueeze(0)
            logits = self._runner.forward(ModelInputs(known, (step.device_seq_lens - 1).unsqueeze(0)), step)
            self._count(num_seqs)
            return logits
        packed = PackedTokens(token_ids, ends - 1, ends, np.arange(num_seqs), is_decode=True)
        return self._forward(self._newest(inputs, packed), packed, self._plan_of(inputs, packed))

    def run(self, items: Sequence[BatchItem], blender: Blender | None = None) -> Computed:
        """Compute one forward pass over any sequences, as `compute`; return the logits of the wanted tokens.

        blender: for items that reuse segments; None if there are none.
        """
        seq_ids, packed = [item.seq_id for item in items], _packed(items)
        if self._groups is not None:
            return Computed(self._of_groups(seq_ids, packed, 0, [None] * len(seq_ids)), [])
        rows = self._manager.rows.of(seq_ids)
        if not any(item.reuse for item in items):
            step, plan = self._begin(rows, packed)
            return Computed(self._forward(step, packed, plan), [])
        assert blender is not None, "a request is admitted with reused segments only where there is a blender"
        self._transfers.run()  # blending writes to all layers before the first one computes
        self._transfers.expected.wait()
        step, _ = self._begin(rows, packed)
        blend = blender.begin(step, items)
        logits = self._runner.forward(packed, replace(step, blend=blend))
        blended = blend.counts()
        self._count(len(packed.token_ids) - sum(counts.num_reused for counts in blended))
        return Computed(logits, blended)

    def _plan_of(self, inputs: DecodeInputs, packed: PackedTokens) -> StepPlan | None:
        """Return what other ranks are told of a step of decodes; None where there are none."""
        if self._others is None:
            return None
        blocks = [GroupBlocks(group.slots, group.block_tables) for group in (inputs.full, *inputs.windows)]
        return StepPlan(packed, blocks, inputs.state_rows())

    def _newest(self, inputs: DecodeInputs, packed: PackedTokens | None = None) -> Step:
        """Return a step that computes the last token of each sequence. packed: see Step.make."""
        step = Step.of_newest(self._cache, inputs.full, packed)
        if self._groups is not None:
            self._groups.add_decodes(step, inputs)
        return step

    def _forward(self, step: Step, packed: PackedTokens, plan: StepPlan | None) -> torch.Tensor:
        if self._others is None or plan is None:
            logits = self._runner.forward(packed, step)
        else:
            self._runner.check()
            with self._others.computing(plan):
                logits = self._runner.forward(packed, step)
        self._count(len(packed.token_ids))
        return logits

    def _begin(self, rows: Rows, packed: PackedTokens) -> tuple[Step, StepPlan]:
        """Return a step of full layers alone, once the due moves of blocks have begun. rows: see SequenceSteps."""
        arrival = self._transfers.start()
        plan = StepPlan(packed, [self._full_blocks(rows, packed)])
        return self._step(plan, arrival), plan

    def _full_blocks(self, rows: Rows, packed: PackedTokens) -> GroupBlocks:
        steps = self._manager.rows
        return GroupBlocks(steps.slots(rows, packed.starts, packed.ends), steps.tables(rows))

    def _step(self, plan: StepPlan, arrival: Arrival | None) -> Step:
        """Return the arguments of attention. arrival: moves that have begun."""
        step = self._caches.step(plan)
        step.expect(self._transfers.expected.join(arrival, plan.blocks[0].tables))
        return step

    def _count(self, num_tokens: int) -> None:
        self._reports.fetch()
        self.num_passes += 1
        self.num_computed_tokens += num_tokens


def _packed(items: Sequence[BatchItem]) -> PackedTokens:
    """Return the tokens of the items in one row."""
    starts, ends = (np.array(column, np.int64) for column in ([i.start for i in items], [i.end for i in items]))
    first_rows = (np.cumsum(ends - starts) - (ends - starts)).tolist()
    wanted_rows = [first + index for first, item in zip(first_rows, items, strict=True) for index in item.wanted]
    tokens = np.concatenate([item.token_ids for item in items])
    return PackedTokens(tokens, starts, ends, np.array(wanted_rows, np.int64))

"""Padding: steps of sequences that belong to nobody. Their tokens are written nowhere, and nothing reads their results.

Their attention may read anything: their tables name block 0 again and again. So a cache of one block serves.
"""

from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvpage.blend.segments import Reuse, SegmentKV
from kvpage.serving.blending.blender import Blender
from kvpage.serving.loop.graphs.static_inputs import PAD_SLOT
from kvpage.serving.loop.ranks.rank_caches import PAD_STATE, RankCaches
from kvpage.serving.loop.ranks.step_plan import GroupBlocks, OtherRanks, StepPlan
from kvpage.serving.model.runner import ModelRunner
from kvpage.serving.model.states.state_pass import StateRow
from kvpage.serving.model.step import BatchItem, PackedTokens, Step

NUM_QUERIES = 1, 2, 3, 5, 9, 17, 33, 65
MOST_KEYS = 2048
"""Kernels are compiled anew from some power of two of queries on, and up to this number of keys of a sequence."""


class StepLimits(NamedTuple):
    """The most sequences of a step, tokens of all of them, and tokens of one sequence with those before."""

    num_seqs: int
    num_tokens: int
    seq_len: int


class Padding(NamedTuple):
    """A step of `num_seqs` sequences, each of `num_queries` tokens after others: `seq_len` in all."""

    num_seqs: int
    num_queries: int
    seq_len: int


def every_kind(limits: StepLimits) -> list[Padding]:
    """Return steps that ask for all kernels which the steps of an engine ask for.

    Attention is compiled for one, few, some or many queries of a sequence, and for keys that are split or not. How many
    these are is the kernels' own affair, so all numbers that may make a difference are tried. Each sequence goes on
    from tokens in blocks: latents are read there only then. Several sequences share all but the last token of each.
    """
    most = min(limits.num_tokens, limits.seq_len)
    counts = [count for count in NUM_QUERIES if count < most]
    steps = [(count, length) for count in [*counts, most] for length in (count + 1, count + MOST_KEYS)]
    alone = [Padding(1, *step) for step in dict.fromkeys((count, min(end, limits.seq_len)) for count, end in steps)]
    most_seqs = min(limits.num_seqs, limits.num_tokens)
    together = dict.fromkeys(min(count, most_seqs) for count in NUM_QUERIES[1:])
    return alone + [Padding(count, 1, min(1 + MOST_KEYS, limits.seq_len)) for count in together if count > 1]


def largest(limits: StepLimits) -> list[Padding]:
    """Return the steps that take the most memory: one long prompt, many short ones, and decodes of all sequences."""
    most = min(limits.num_tokens, limits.seq_len)
    num_seqs = min(limits.num_seqs, limits.num_tokens)
    num_tokens = min(limits.num_tokens // num_seqs, limits.seq_len)
    return [Padding(1, most, most), Padding(num_seqs, num_tokens, num_tokens), Padding(num_seqs, 1, 1)]


class PaddedSteps:
    """Steps of padding for one model. others: the ranks that compute, too."""

    def __init__(self, runner: ModelRunner, caches: RankCaches, others: OtherRanks | None = None) -> None:
        self._runner, self._caches, self._cache, self._others = runner, caches, caches.full, others

    @property
    def launches_kernels(self) -> bool:
        """Whether kernels are launched for the blocks."""
        return any(layer.is_cuda for layer in self._cache.bound_layers.values())

    @property
    def have_others(self) -> bool:
        """Whether other ranks compute, too."""
        return self._others is not None

    @property
    def device(self) -> torch.device:
        """Where the steps are computed."""
        return self._cache.device

    def compute(self, padding: Padding) -> torch.Tensor:
        """Compute a step; return the logits of each sequence's last token: [num_seqs, vocab_size]."""
        packed, slots, tables = self._packed([padding.num_queries] * padding.num_seqs, padding.seq_len)
        blocks = [GroupBlocks(slots, tables)] * (1 + len(self._caches.windows))
        row = StateRow(PAD_STATE, padding.seq_len - padding.num_queries, padding.seq_len)
        plan = StepPlan(packed, blocks, [] if self._caches.states is None else [row] * padding.num_seqs)
        step = self._caches.step(plan)
        with nullcontext() if self._others is None else self._others.computing(plan):
            return self._runner.forward(packed, step)

    def compute_blended(self, padding: Padding, blender: Blender, segment: SegmentKV) -> None:
        """Compute a prompt of the padding's length beside a decode. The first of a segment is the prompt's last token.

        The last token of a prompt is chosen in any case, so the layers after the choice have as many queries as before.
        """
        packed, slots, tables = self._packed([1, padding.num_queries], padding.seq_len)
        step = Step.make(self._cache, slots, tables, packed.starts, packed.ends, packed)
        decode, prompt = (
            BatchItem(None, np.zeros(end - start, np.int32), start, end, [end - start - 1])
            for start, end in zip(packed.starts, packed.ends, strict=True)
        )
        reuse = [Reuse(segment, 0, padding.seq_len - 1, 1)]
        blend = blender.begin(step, [decode, prompt._replace(reuse=reuse)])
        self._runner.forward(packed, replace(step, blend=blend))

    def _packed(
        self, query_lens: list[int], seq_len: int
    ) -> tuple[PackedTokens, npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        """Return the tokens of sequences of one length, with these numbers of queries, their slots and block tables."""
        num_seqs, num_tokens = len(query_lens), sum(query_lens)
        starts, ends = [seq_len - count for count in query_lens], [seq_len] * num_seqs
        packed = PackedTokens(np.zeros(num_tokens, np.int32), starts, ends, np.cumsum(query_lens) - 1)
        tables = np.zeros((num_seqs, -(-seq_len // self._block_size)), np.int32)
        return packed, np.full(num_tokens, PAD_SLOT, np.int64), tables

    @property
    def _block_size(self) -> int:
        return self._cache.layout.block_size if self._cache.layer_ids else 1

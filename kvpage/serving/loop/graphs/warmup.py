"""Warmup: steps of nothing before the first request, after which kernels are compiled and decode steps captured.

a prompt of padding ─► kernels, libraries' workspaces, the most memory that a step takes
decode steps of padding ─► captured, one for each number of sequences
"""

import logging
import time
from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]  # it comes with transformers

from kvpage.cache.cache_engine import CacheEngine
from kvpage.serving.loop.graphs.decode_graphs import DecodeGraphs
from kvpage.serving.loop.graphs.static_inputs import PAD_SLOT
from kvpage.serving.loop.ranks.other_ranks import OtherRanks
from kvpage.serving.model.runner import ModelRunner
from kvpage.serving.model.step import PackedTokens, Step

logger = logging.getLogger(__name__)


def warm_up(
    runner: ModelRunner,
    cache: CacheEngine,
    graphs: DecodeGraphs | None,
    num_tokens: int,
    progress: Callable[[int], object] | None,
    others: OtherRanks | None = None,
) -> None:
    """Compute a prompt of so many tokens of padding, and a decode step; then capture. Nothing is written into blocks.

    progress: called with 1 after each part; None shows a bar on a terminal. others: the ranks that compute, too.
    """
    begin, num_parts = time.monotonic(), 2 + (graphs.num_captures if graphs else 0)
    with tqdm(total=num_parts, desc="warmup", disable=None if progress is None else True) as bar:
        tell = bar.update if progress is None else progress
        for num in (num_tokens, 1):
            _compute_padding(runner, cache, num, others)
            tell(1)
        if graphs is not None:
            graphs.capture(tell)
            stats = graphs.stats()
            logger.info(
                "captured decode steps of %s sequences in %.1f s, %.0f MiB",
                list(stats.sizes), time.monotonic() - begin, stats.num_bytes / 2**20,
            )  # fmt: skip


def _compute_padding(runner: ModelRunner, cache: CacheEngine, num_tokens: int, others: OtherRanks | None) -> None:
    """Compute a sequence of padding. What its attention reads is of no account, and so are its logits."""
    slots = np.full(num_tokens, PAD_SLOT, np.int64)
    table = np.zeros((1, -(-num_tokens // cache.layout.block_size)), np.int32)
    token_ids = np.zeros(num_tokens, np.int32)
    packed = PackedTokens(token_ids, [0], [num_tokens], np.array([num_tokens - 1]))
    step = Step.make(cache, slots, table, [0], [num_tokens], packed)
    with nullcontext() if others is None else others.computing(packed, slots, table):
        runner.forward(packed, step)

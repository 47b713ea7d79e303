"""Warmup: steps of nothing before the first request, after which kernels are compiled and decode steps captured.

steps of every kind      ─► rehearsed: what their kernels are compiled for is noted, and compiled side by side
the largest steps        ─► computed: libraries' workspaces, the most memory that a step takes
decode steps of padding  ─► captured, one for each number of sequences
"""

import logging
import time
from collections.abc import Callable

from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]  # it comes with transformers

from kvpage.ops.cuda.rehearsal import compile_all, rehearse
from kvpage.serving.loop.graphs.decode_graphs import DecodeGraphs
from kvpage.serving.loop.graphs.padding import PaddedSteps, StepLimits, every_kind, largest
from kvpage.serving.sampling.device_rows import choose_for_nobody

logger = logging.getLogger(__name__)
Progress = Callable[[int], object]


def warm_up(steps: PaddedSteps, graphs: DecodeGraphs | None, limits: StepLimits, progress: Progress | None) -> None:
    """Compile what steps within these limits ask for, compute some, and capture decodes. No block is written.

    progress: called with 1 after each part; None shows a bar on a terminal.
    """
    begin, num_captures = time.monotonic(), graphs.num_captures if graphs else 0
    with tqdm(total=num_captures, desc="warmup", disable=None if progress is None else True) as bar:
        tell = bar.update if progress is None else progress
        prepare_steps(steps, limits, tell, _adds_to(bar))
        if graphs is not None:
            graphs.capture(tell)
            stats = graphs.stats()
            logger.info(
                "captured decode steps of %s sequences in %.1f s, %.0f MiB",
                list(stats.sizes), time.monotonic() - begin, stats.num_bytes / 2**20,
            )  # fmt: skip


def _adds_to(bar: tqdm) -> Progress:
    def add(num: int) -> None:
        bar.total += num
        bar.refresh()

    return add


def prepare_steps(
    steps: PaddedSteps,
    limits: StepLimits,
    tell: Progress = lambda num: None,
    announce: Progress = lambda num: None,
) -> None:
    """Compile what steps within these limits ask for, and compute the largest ones.

    tell: called with 1 after each part. announce: called with the numbers of parts to come.
    """
    real = largest(limits)
    if steps.launches_kernels and not steps.have_others:
        kernels = rehearse(lambda: _compute_every_kind(steps, limits))
        announce(len(kernels))
        compile_all(kernels, steps.device, tell)
    elif steps.launches_kernels:  # the others launch whatever they compute, and compile it with this rank
        real = [*every_kind(limits), *real]
    announce(len(real))
    for padding in real:
        choose_for_nobody(steps.compute(padding))
        tell(1)


def _compute_every_kind(steps: PaddedSteps, limits: StepLimits) -> None:
    for padding in every_kind(limits):
        choose_for_nobody(steps.compute(padding))

"""Warmup: steps of nothing before the first request, after which kernels are compiled and decode steps captured.

steps of every kind      ─► rehearsed: what their kernels are compiled for is noted, and compiled side by side
the largest steps        ─► computed: libraries' workspaces, the most memory that a step takes
decode steps of padding  ─► captured, one for each number of sequences
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]  # it comes with transformers

from kvpage.ops.cuda.rehearsal import Kernels, compile_all, rehearse
from kvpage.serving.blending.connector import BlendConnector
from kvpage.serving.loop.graphs.decode_graphs import DecodeGraphs
from kvpage.serving.loop.graphs.padding import PaddedSteps, Padding, StepLimits, every_kind, largest
from kvpage.serving.sampling.device_rows import choose_for_nobody

logger = logging.getLogger(__name__)
Progress = Callable[[int], object]


def warm_up(
    steps: PaddedSteps,
    graphs: DecodeGraphs | None,
    limits: StepLimits,
    progress: Progress | None,
    beside: Sequence[Callable[[], object]] = (),
) -> None:
    """Compile what steps within these limits ask for, compute some, and capture decodes. No block is written.

    progress: called with 1 after each part; None shows a bar on a terminal. beside: work that asks for kernels, too.
    """
    begin, parts = time.monotonic(), _Parts.of(steps, limits, beside)
    num_parts = parts.num_parts + (graphs.num_captures if graphs else 0)
    with tqdm(total=num_parts, desc="warmup", disable=None if progress is None else True) as bar:
        tell = bar.update if progress is None else progress
        parts.do(steps, tell)
        if graphs is not None:
            graphs.capture(tell)
            stats = graphs.stats()
            logger.info(
                "captured decode steps of %s sequences in %.1f s, %.0f MiB",
                list(stats.sizes), time.monotonic() - begin, stats.num_bytes / 2**20,
            )  # fmt: skip


def prepare_steps(steps: PaddedSteps, limits: StepLimits) -> None:
    """Compile what steps within these limits ask for, and compute the largest ones."""
    _Parts.of(steps, limits).do(steps, lambda num: None)


def rehearse_blending(steps: PaddedSteps, limits: StepLimits, blend: BlendConnector) -> None:
    """Ask for the kernels that compute blended prompts within these limits, and that copy segments to be kept.

    Where all is known of a segment, even the first layer attends from chosen rows. Else a later layer compares rows.
    """
    segment = blend.rehearse()
    unknown = replace(segment, sensitivity=None)
    known = replace(segment, sensitivity=torch.zeros(segment.num_tokens))
    steps.compute_blended(every_kind(limits)[0], blend.blender, unknown)
    for padding in every_kind(limits):
        steps.compute_blended(padding, blend.blender, known)


class _Parts(NamedTuple):
    """The kernels to compile and the steps to compute. kernels: see kvpage.ops.cuda.rehearsal."""

    kernels: Kernels
    paddings: list[Padding]

    @classmethod
    def of(cls, steps: PaddedSteps, limits: StepLimits, beside: Sequence[Callable[[], object]] = ()) -> "_Parts":
        if not steps.launches_kernels:
            return cls((), largest(limits))
        if steps.have_others:  # they launch whatever they compute, and compile it with this rank
            return cls((), [*every_kind(limits), *largest(limits)])
        return cls(rehearse(lambda: _ask(steps, limits, beside)), largest(limits))

    @property
    def num_parts(self) -> int:
        """How many there are."""
        return len(self.kernels) + len(self.paddings)

    def do(self, steps: PaddedSteps, tell: Progress) -> None:
        """Compile and compute. tell: called with 1 after each part."""
        compile_all(self.kernels, steps.device, tell)
        _compute(steps, self.paddings, tell)


def _ask(steps: PaddedSteps, limits: StepLimits, beside: Sequence[Callable[[], object]]) -> None:
    """Ask for all kernels."""
    _compute(steps, every_kind(limits))
    for work in beside:
        work()


def _compute(steps: PaddedSteps, paddings: Sequence[Padding], tell: Progress = lambda num: None) -> None:
    for padding in paddings:
        choose_for_nobody(steps.compute(padding))
        tell(1)

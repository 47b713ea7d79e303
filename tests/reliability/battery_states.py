"""Engines over models with states: random requests."""

from battery import Advance, Battery, Figures
from support.state_crowd import StateCrowd

KINDS, LIFE = ("lfm2", "mamba2", "qwen3_next", "jamba"), 500


def run_engines(seed: int, count: int, advance: Advance) -> Figures:
    figures: Figures = {}
    for i, begin in enumerate(range(0, count, LIFE)):
        crowd = StateCrowd(KINDS[i % len(KINDS)], (seed << 32) + i)
        crowd.live(min(LIFE, count - begin), advance)
        for name, value in crowd.figures.items():
            figures[name] = figures.get(name, 0) + value
    return figures


BATTERIES = [Battery("random requests of hybrids", "requests", 40, 10_000, run_engines, longest=LIFE * len(KINDS))]

"""Engines whose windows have blocks of their own: random requests, with little more blocks than one sequence needs."""

from battery import Advance, Battery, Figures
from support.window_crowd import WindowCrowd

KINDS, LIFE = ("gemma3", "mistral", "cohere2", "gpt_oss", "gemma2"), 40


def run(seed: int, count: int, advance: Advance) -> Figures:
    """Lives of LIFE requests, or of more where each model has one. The models take turns."""
    figures: Figures = {}
    life = max(LIFE, count // len(KINDS))
    for i, begin in enumerate(range(0, count, life)):
        crowd = WindowCrowd(KINDS[i % len(KINDS)], (seed << 32) + i)
        crowd.live(min(life, count - begin), advance)
        for name, value in crowd.figures.items():
            figures[name] = figures.get(name, 0) + value
    return figures


BATTERIES = [Battery("random requests over windows", "requests", 80, 10_000, run, longest=500 * len(KINDS))]

"""Engines of hybrids, and of windows with blocks of their own: random requests, few blocks, few slots."""

from collections.abc import Callable
from functools import partial

from battery import Advance, Battery, Figures
from support.crowd import Crowd
from support.state_crowd import StateCrowd
from support.window_crowd import WindowCrowd

HYBRIDS = ("lfm2", "mamba2", "qwen3_next", "jamba")
WINDOWS = ("gemma3", "mistral", "cohere2", "gpt_oss", "gemma2")
LEAST, MOST = 40, 500  # requests of a life


def run(kind: Callable[[str, int], Crowd], models: tuple[str, ...], seed: int, count: int, advance: Advance) -> Figures:
    """Lives that the models take turns at; each has one, where the requests suffice."""
    figures: Figures = {}
    life = min(max(LEAST, count // len(models)), MOST)
    for i, begin in enumerate(range(0, count, life)):
        crowd = kind(models[i % len(models)], (seed << 32) + i)
        crowd.live(min(life, count - begin), advance)
        for name, value in crowd.figures.items():
            figures[name] = figures.get(name, 0) + value
    return figures


def crowds(name: str, kind: Callable[[str, int], Crowd], models: tuple[str, ...], short: int) -> Battery:
    return Battery(name, "requests", short, 10_000, partial(run, kind, models), longest=MOST * len(models))


BATTERIES = [
    crowds("random requests of hybrids", StateCrowd, HYBRIDS, 40),
    crowds("random requests over windows", WindowCrowd, WINDOWS, 80),
]

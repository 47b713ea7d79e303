"""Engines over models with states: random requests, and prompts that go on from a disk in a second process."""

import tempfile
from pathlib import Path

from battery import Advance, Battery, Figures
from support.state_crowd import StateCrowd
from support.state_disk import NUM_COMMON, generated, prompts_of, serve, serve_elsewhere
from support.state_models import SERVED

KINDS, LIFE = ("lfm2", "mamba2", "qwen3_next", "jamba"), 500


FROM_DISK = ["lfm2", *(kind for kind in SERVED if kind != "lfm2")]


def run_engines(seed: int, count: int, advance: Advance) -> Figures:
    figures: Figures = {}
    for i, begin in enumerate(range(0, count, LIFE)):
        crowd = StateCrowd(KINDS[i % len(KINDS)], (seed << 32) + i)
        crowd.live(min(LIFE, count - begin), advance)
        for name, value in crowd.figures.items():
            figures[name] = figures.get(name, 0) + value
    return figures


def run_from_disk(seed: int, count: int, advance: Advance) -> Figures:
    """One process stores, and another one goes on. Tokens are those of model.generate, and hits those of an ideal."""
    kinds, ends = FROM_DISK[:count], [len(prompt) - 1 for prompt in prompts_of(seed)]
    with tempfile.TemporaryDirectory() as folder:
        first = serve(Path(folder), seed, kinds)
        second = serve_elsewhere(Path(folder), seed, kinds)
    for kind in kinds:
        tokens = generated(seed, kind)
        for served, found in ((first[kind], [0, 0, NUM_COMMON, 0]), (second[kind], ends)):
            assert served == list(zip(tokens, found, strict=True)), f"{kind}, seed {seed}: {served}, not {tokens}"
        advance(1)
    return {"prompts": len(ends) * len(kinds), "tokens from disk": sum(ends) * len(kinds)}


BATTERIES = [
    Battery("random requests of hybrids", "requests", 40, 10_000, run_engines),
    Battery("hybrids from disk in a second process", "families", 1, len(FROM_DISK), run_from_disk),
]

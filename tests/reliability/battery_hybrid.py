"""Random lives of managers of hybrid models: after each step, every state, block and tail that is read holds the exact
prefix that it stands for."""

from battery import Advance, Battery, Figures
from support.hybrid_worlds import WORLDS

LIFE, CHECK_EVERY = 1_000, 16


def run_managers(seed: int, count: int, advance: Advance) -> Figures:
    figures: Figures = {}
    for i, begin in enumerate(range(0, count, LIFE)):
        num_steps = min(LIFE, count - begin)
        life = WORLDS[i % len(WORLDS)].life((seed << 32) + i)
        life.live(num_steps, CHECK_EVERY)
        for name, value in life.figures.items():
            figures[name] = figures.get(name, 0) + value
        advance(num_steps)
    return figures


BATTERIES = [Battery("random hybrid managers", "operations", 10_000, 20_000_000, run_managers)]

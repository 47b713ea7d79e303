"""Random lives of managers of hybrid models: after each step, every state, block and tail that is read holds the exact
prefix that it stands for. Each world gets its share of the operations."""

from battery import Advance, Battery, Figures
from support.hybrid_worlds import WORLDS

LIFE, CHECK_EVERY = 1_000, 16


def lives(count: int) -> list[int]:
    """Return how many operations each life has: whole rounds of all worlds, of about LIFE operations at most."""
    num_lives = -(-count // (LIFE * len(WORLDS))) * len(WORLDS)
    ends = [count * life // num_lives for life in range(num_lives + 1)]
    return [end - begin for begin, end in zip(ends, ends[1:], strict=False)]


def run_managers(seed: int, count: int, advance: Advance) -> Figures:
    figures: Figures = {}
    for i, num_steps in enumerate(lives(count)):
        life = WORLDS[i % len(WORLDS)].life((seed << 32) + i)
        life.live(num_steps, CHECK_EVERY)
        for name, value in life.figures.items():
            figures[name] = figures.get(name, 0) + value
        advance(num_steps)
    return figures


BATTERIES = [Battery("random hybrid managers", "operations", 10_000, 20_000_000, run_managers)]

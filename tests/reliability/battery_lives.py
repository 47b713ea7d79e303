"""Random lives beside naive models, of every part that has one. The worlds of a part take turns."""

from collections.abc import Sequence
from functools import partial

from battery import Advance, Battery, Figures
from serving.loop.test_scheduler import Simulation
from support import drafted_life, group_worlds, slot_life, store_life, tree_life
from support.life import World


def run(
    worlds: Sequence[World], life_steps: int, compare_every: int, seed: int, count: int, advance: Advance
) -> Figures:
    """Whole rounds of all worlds, of about `life_steps` operations a life at most."""
    num_lives = -(-count // (life_steps * len(worlds))) * len(worlds)
    ends = [count * number // num_lives for number in range(num_lives + 1)]
    figures: Figures = {}
    for number, (begin, end) in enumerate(zip(ends, ends[1:], strict=False)):
        life = worlds[number % len(worlds)].life((seed << 32) + number)
        life.live(end - begin, compare_every)
        for name, value in life.figures.items():
            figures[name] = figures.get(name, 0) + value
        advance(end - begin)
    return figures


def run_schedulers(seed: int, count: int, advance: Advance) -> Figures:
    """Simulations of at most 200 steps."""
    figures: Figures = {"forks": 0, "failures": 0, "swapped": 0}
    for number, begin in enumerate(range(0, count, 200)):
        simulation = Simulation((seed << 32) + number)
        simulation.run(min(200, count - begin))
        for name in figures:
            figures[name] += getattr(simulation, f"num_{name}")
        advance(min(200, count - begin))
    return figures


def lives(
    name: str, worlds: Sequence[World], short: int, long: int, life_steps: int, compare_every: int = 1
) -> Battery:
    return Battery(f"random {name}", "operations", short, long, partial(run, worlds, life_steps, compare_every))


BATTERIES = [
    lives("trees", tree_life.WORLDS, 5_000, 5_000_000, 4_000, 4),
    lives("managers", group_worlds.ALONE, 5_000, 20_000_000, 4_000, 32),
    lives("managers of groups", group_worlds.WORLDS, 5_000, 20_000_000, 1_000, 16),
    lives("managers with drafts", drafted_life.WORLDS, 1_000, 2_000_000, 500, 4),
    lives("slots", slot_life.WORLDS, 2_000, 5_000_000, 500),
    lives("stores", store_life.WORLDS, 500, 500_000, 500),
    Battery("random schedulers", "steps", 1_000, 1_000_000, run_schedulers),
]

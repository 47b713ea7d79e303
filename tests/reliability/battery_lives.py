"""Random lives beside naive models, of every part that has one. The worlds of a part take turns."""

from collections.abc import Callable
from functools import partial

from battery import Advance, Battery, Figures
from serving.loop.test_scheduler import Simulation
from support import hybrid_worlds, manager_life, tree_life, window_life
from support.grouped_life import WORLDS as GROUPED_WORLDS
from support.grouped_life import GroupedLife, managers
from support.life import Life
from support.slot_life import CAPACITIES, SlotLife
from support.store_life import WORLDS as STORE_WORLDS
from support.store_life import StoreLife

Make = Callable[[int], Life]


def run(makers: list[Make], life_steps: int, compare_every: int, seed: int, count: int, advance: Advance) -> Figures:
    """Whole rounds of all makers, of about `life_steps` operations a life at most."""
    num_lives = -(-count // (life_steps * len(makers))) * len(makers)
    ends = [count * number // num_lives for number in range(num_lives + 1)]
    figures: Figures = {}
    for number, (begin, end) in enumerate(zip(ends, ends[1:], strict=False)):
        life = makers[number % len(makers)]((seed << 32) + number)
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


def lives(name: str, makers: list[Make], short: int, long: int, life_steps: int, compare_every: int = 1) -> Battery:
    return Battery(f"random {name}", "operations", short, long, partial(run, makers, life_steps, compare_every))


BATTERIES = [
    lives("trees", [world.life for world in tree_life.WORLDS], 5_000, 5_000_000, 4_000, 4),
    lives("managers", [world.life for world in manager_life.WORLDS], 5_000, 20_000_000, 4_000, 32),
    lives("hybrid managers", [world.life for world in hybrid_worlds.WORLDS], 5_000, 20_000_000, 1_000, 16),
    lives("managers of windows", [world.life for world in window_life.WORLDS], 1_000, 2_000_000, 500, 4),
    lives(
        "managers with drafts",
        [lambda seed, sizes=sizes: GroupedLife(managers(*sizes), seed) for sizes in GROUPED_WORLDS],
        1_000, 2_000_000, 500, 4,
    ),
    lives(
        "slots", [lambda seed, most=most: SlotLife(seed, most) for most in CAPACITIES], 2_000, 5_000_000, 500
    ),
    lives(
        "stores", [lambda seed, world=world: StoreLife(seed, *world) for world in STORE_WORLDS], 500, 500_000, 500
    ),
    Battery("random schedulers", "steps", 1_000, 1_000_000, run_schedulers),
]  # fmt: skip

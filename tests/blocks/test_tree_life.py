"""Random lives of a pool and a prefix tree, in one tier and in two. The long form is a battery."""

from collections import Counter

from support.seeds import seed_of
from support.tree_life import WORLDS

NUM_OPERATIONS = 500  # of each world


def test_random_lives() -> None:
    figures: Counter[str] = Counter()
    for number, world in enumerate(WORLDS):
        life = world.life(seed_of(number))
        life.live(NUM_OPERATIONS)
        figures += life.figures
    expected = ("ValueError", "OutOfBlocks", "parts", "promoted", "demoted", "filled", "gone", "told", "hits", "nodes")
    assert min(figures[name] for name in expected) > 0, figures

"""Random lives of a pool and a prefix tree, in one tier and in two. The long form is a battery."""

from support.life import lived, total
from support.tree_life import WORLDS

NUM_OPERATIONS = 500  # of each world


def test_random_lives() -> None:
    figures = total(lived(WORLDS, NUM_OPERATIONS))
    expected = ("ValueError", "OutOfBlocks", "parts", "promoted", "demoted", "filled", "gone", "told", "hits", "nodes")
    expected += ("companions", "dead companions", "first")
    assert min(figures[name] for name in expected) > 0, figures

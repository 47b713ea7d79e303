"""Random lives of a BlockManager. Every state, block and tail holds the exact prefix that it stands for, and what
nobody owns is poisoned. The long form is the battery of hybrid managers."""

from support.hybrid_worlds import WORLDS
from support.life import lived, total


def test_states_and_blocks_are_those_of_the_exact_prefix():
    lives = lived(WORLDS, 200)
    for life, world in zip(lives, WORLDS, strict=True):
        assert world.is_caching or not life.figures["restored"]
        assert world.is_caching and world.block_size > 1 or not life.figures["tails"]
        assert world.num_host_slots or not life.figures["resumed"]
    figures = total(lives)
    assert min(figures[name] for name in ("refused", "restored", "tails", "whole", "resumed", "kept_ends")) > 0, figures

"""Random lives of a BlockManager of every combination of groups. Every block, window, state and tail holds the exact
prefix that it stands for, and what nobody owns is poisoned. The long form is the battery of managers of groups."""

from support.group_worlds import BOTH, WORLDS
from support.life import lived, total


def test_all_groups_hold_the_exact_prefix():
    lives = lived(WORLDS, 250)
    for life, world in zip(lives, WORLDS, strict=True):
        assert world.is_caching or not life.figures["restored"]
        begins_amid = world.states or world.shares_parts
        assert (world.is_caching and begins_amid and world.block_size > 1) or not life.figures["tails"]
        assert world.num_host_blocks or not life.figures["resumed"]
    figures = total(lives)
    names = ("refused", "restored", "tails", "whole", "resumed", "kept_ends", "loaded", "held")
    assert min(figures[name] for name in names) > 0, figures
    assert total(lives[-len(BOTH) :])["tails"] > 0, "amid a block, with windows beside states"

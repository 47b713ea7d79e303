"""Random lives of a HybridManager. Every state, block and tail holds the exact prefix that it stands for, and what
nobody owns is poisoned. The long form is the battery of hybrid managers."""

from collections import Counter

from support.hybrid_worlds import WORLDS
from support.seeds import seed_of


def test_states_and_blocks_are_those_of_the_exact_prefix():
    figures = Counter()
    for number, world in enumerate(WORLDS):
        life = world.life(seed_of(number))
        life.live(200)
        figures += life.figures
        assert world.is_caching or not life.figures["restored"]
        assert world.is_caching and world.block_size > 1 or not life.figures["tails"]
        assert world.num_host_slots or not life.figures["resumed"]
    expected = ("refused", "restored", "tails", "whole", "resumed", "kept_ends")
    assert min(figures[name] for name in expected) > 0, figures

"""Companions: the numbers of what is kept beside cached blocks. Beside a model: TreeLife."""

import numpy as np
import pytest
from support.block_requests import B

from kvpage import BlockConfig, BlockManager, BlockPool, PrefixTree, States, Window
from kvpage.blocks.space import BlockSpace

TOKENS = list(range(4 * B))


def filled(num_host_blocks: int = 0) -> tuple[PrefixTree, BlockPool]:
    """A tree of one cached prompt of four blocks, which have the companions 3 to 0 in some order."""
    pool = BlockPool(8)
    tree = PrefixTree(pool, B, BlockPool(num_host_blocks) if num_host_blocks else None)
    match = tree.insert(TOKENS, pool.allocate(4))
    tree.give_companions(match, 0, 4)
    tree.release(match)
    return tree, pool


def companions(tree: PrefixTree, tokens: list[int] = TOKENS) -> list[int]:
    return tree.look(tokens)[0][2].tolist()


def test_a_companion_is_its_blocks_in_both_tiers_and_in_both_halves_of_an_edge():
    tree, pool = filled(num_host_blocks=4)
    before = companions(tree)
    assert sorted(before) == [0, 1, 2, 3]
    tree.demote(2)
    assert companions(tree) == before
    match = tree.match(TOKENS, num_left_over=0)
    tree.promote(match, pool.allocate(1))
    tree.release(match)
    for num_tokens in (B, 2 * B + 1):  # splits the edge
        tree.release(tree.match(TOKENS[:num_tokens], num_left_over=0))
    assert companions(tree) == before and not tree.dead_companions()
    tree.check()


@pytest.mark.parametrize("num_evicted", [0, 1, 2, 4])
def test_it_dies_with_the_block_and_is_given_to_others_only_afterwards(num_evicted):
    tree, pool = filled()
    before = companions(tree)
    tree.evict(num_evicted)
    assert companions(tree) == before[: 4 - num_evicted]
    assert sorted(tree.dead_companions()) == sorted(before[4 - num_evicted :])
    match = tree.insert([7] * B, pool.allocate(1))
    tree.give_companions(match, 0, 1)
    assert companions(tree, [7] * B) == [4]  # none that has died
    tree.release(match)
    tree.free_companions(num_evicted)
    assert not tree.dead_companions()
    match = tree.insert([8] * B, pool.allocate(1))
    tree.give_companions(match, 0, 1)
    assert companions(tree, [8] * B)[0] in (before[4 - num_evicted :] or [5])
    tree.release(match)
    tree.check()


def test_one_that_is_given_stays():
    tree, _ = filled()
    match = tree.match(TOKENS, num_left_over=0)
    before = companions(tree)
    tree.give_companions(match, 1, 3)
    assert companions(tree) == before and match.tier_block_ids(2)[2].tolist() == before[2:]
    for start, end in ((-1, 1), (2, 1), (0, 5)):
        with pytest.raises(ValueError, match="start and end must be in order and at most 4"):
            tree.give_companions(match, start, end)
    tree.release(match)
    with pytest.raises(ValueError, match="released already"):
        tree.give_companions(match, 0, 1)


def test_owners_that_were_interrupted_are_told_again():
    space = BlockSpace(BlockConfig(4, B))
    match = space.tree.insert(TOKENS, space.pool.allocate(4))
    space.give_companions(match, 0, 4)
    space.tree.release(match)
    told: list[list[int]] = []

    class Watcher:
        def blocks_gone(self, companions):
            told.append(sorted(companions))
            if len(told) == 1:
                raise KeyboardInterrupt

    space.watch([Watcher()])
    space.bury_companions()
    assert not told
    space.tree.evict(2)
    with pytest.raises(KeyboardInterrupt):
        space.bury_companions()
    assert len(space.tree.dead_companions()) == 2
    space.bury_companions()
    space.bury_companions()
    assert len(told) == 2 and told[0] == told[1] and not space.tree.dead_companions()


@pytest.mark.parametrize("groups", [[Window(B, 8)], [States(8)], [Window(B, 8), States(8)]])
def test_what_groups_keep_is_free_again_once_the_blocks_are_gone(groups):
    manager = BlockManager(8, B, groups=groups)
    for round_number in range(4):
        tokens = np.arange(3 * B) + 1000 * round_number
        manager.allocate(0, tokens, cache_at=[2 * B])
        manager.windows.open([0], [len(tokens)])
        if manager.states:
            manager.states.reserve(0, 0, len(tokens))
        manager.take_moves()
        manager.commit(0, tokens)
        manager.keep(0)
        manager.release(0)
        manager.check()
    manager.reset_prefix_cache()
    manager.space.bury_companions()
    manager.check()
    assert all(window.blocks.pool.num_free == 8 for window in manager.windows)
    assert manager.states is None or manager.states.space.device.num_free == 8


def test_none_for_no_blocks_leave_nothing_behind():
    """An empty range before any companion was given left entries that outlived their blocks."""
    pool = BlockPool(4)
    tree = PrefixTree(pool, B)
    match = tree.insert(TOKENS, pool.allocate(4))
    tree.give_companions(match, 3, 3)
    tree.release(match)
    tree.evict(3)
    tree.check()

"""PrefixTree.hottest: the runs that most matches have found, from a bounded look. Beside a model: TreeLife."""

import numpy as np
import pytest

from kvpage import BlockPool, HotPrefix, PrefixTree

B = 2
MOST_SEEN = 4096


def grown(*paths: tuple[bytes, list[int], int]) -> tuple[BlockPool, PrefixTree]:
    """A tree of these paths, each found so many times."""
    pool = BlockPool(64)
    tree = PrefixTree(pool, B)
    for name, tokens, num_hits in paths:
        tree.release(tree.insert(tokens, pool.allocate(len(tokens) // B), name))
        for _ in range(num_hits):
            tree.release(tree.match([*tokens, 0], name))
    return pool, tree


def shown(found: list[HotPrefix]) -> list[tuple[int | None, list[int], int]]:
    return [(prefix.parent, prefix.first_tokens.tolist(), prefix.num_hits) for prefix in found]


PATHS = (b"", [1, 2, 3, 4], 2), (b"a", [7, 7], 9), (b"", [1, 2, 5, 6, 7, 8], 4), (b"", [8, 8], 1)


def test_each_comes_after_the_one_that_it_goes_on_from():
    _, tree = grown(*PATHS)
    everything = [(None, [7, 7], 9), (None, [1, 2], 6), (1, [5, 6, 7, 8], 4), (1, [3, 4], 2), (None, [8, 8], 1)]
    for limit in range(7):
        assert shown(tree.hottest(limit)) == everything[:limit]
    assert [prefix.namespace for prefix in tree.hottest(9)] == [b"a", b"", b"", b"", b""]
    assert [prefix.start for prefix in tree.hottest(9)] == [0, 0, 2, 2, 0]


@pytest.mark.parametrize("max_tokens", [0, 1, 3, 4, 5])
def test_the_first_tokens_are_cut_and_the_counts_are_not(max_tokens):
    _, tree = grown((b"", [1, 2, 3, 4], 1))
    (prefix,) = tree.hottest(5, max_tokens)
    assert prefix.first_tokens.tolist() == [1, 2, 3, 4][:max_tokens] and prefix.first_tokens.dtype == np.int32
    assert (prefix.num_tokens, prefix.num_blocks, prefix.num_hits) == (4, 2, 1)


@pytest.mark.parametrize("arguments", [{"limit": -1}, {"limit": 1, "max_tokens": -1}])
def test_negative_numbers_are_refused(arguments):
    name = [*arguments][-1]
    with pytest.raises(ValueError, match=f"{name} must not be negative, got -1"):
        PrefixTree(BlockPool(1), B).hottest(**arguments)


def large_tree(num_cold: int) -> tuple[BlockPool, PrefixTree]:
    """Cold prompts side by side, with a hot trunk below one of them."""
    pool = BlockPool(num_cold + 8)
    tree = PrefixTree(pool, B)
    for first in range(num_cold):
        tree.release(tree.insert([first, 0], pool.allocate(1)))
    return pool, tree


@pytest.mark.parametrize("is_pinned", [False, True])
def test_what_is_hot_is_found_in_a_tree_too_large_to_be_read(is_pinned):
    pool, tree = large_tree(3 * MOST_SEEN)
    trunk = [-1, -1, -2, -2]
    held = tree.insert(trunk, pool.allocate(2))
    tree.release(tree.insert([-3, -3], pool.allocate(1), after=tree.pin(held)))
    if not is_pinned:
        tree.release(held)
    for _ in range(5):
        tree.release(tree.match([*trunk, -3, -3, 0]))
    assert shown(tree.hottest(2)) == [(None, [*trunk], 5), (0, [-3, -3], 5)]
    assert len(tree.hottest(10**9)) <= 2 * MOST_SEEN
    tree.clear()

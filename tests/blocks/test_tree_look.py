"""What an index beside the tree asks of it: ids in both tiers, names. Beside a model: TreeLife."""

import numpy as np
import pytest

from kvpage import BlockPool, PrefixTree

B = 4


def filled(num_host_blocks=0):
    pool, tokens = BlockPool(8), list(range(3 * B))
    tree = PrefixTree(pool, B, BlockPool(num_host_blocks) if num_host_blocks else None)
    tree.release(tree.insert(tokens, pool.allocate(3)))
    return pool, tree, tokens


def test_ids_in_both_tiers():
    _, tree, tokens = filled(num_host_blocks=2)
    pairs = dict(tree.demote(2)[1].tolist())
    match = tree.match(tokens, num_left_over=0)
    tree.give_companions(match, 1, 2)
    expected = [[0, -1, -1], [-1, pairs[1], pairs[2]], [-1, 0, -1]]
    for start in range(4):
        found = match.tier_block_ids(start)
        assert found.tolist() == [row[start:] for row in expected] and found.dtype == np.int32
    for wrong in (-1, 4):
        with pytest.raises(ValueError, match="start_block must be between 0 and num_blocks = 3"):
            match.tier_block_ids(wrong)
    tree.release(match)
    with pytest.raises(ValueError, match="released already"):
        match.tier_block_ids()


def test_names():
    pool, tree, tokens = filled()
    tree.release(tree.insert(tokens[:B], pool.allocate(1), b"b"))
    tree.release(tree.insert(tokens[:B], pool.allocate(1), b"a"))
    tree.release(tree.match(tokens, b"nothing"))
    assert [tree.names(limit) for limit in range(4)] == [[], [b""], [b"", b"a"], [b"", b"a", b"b"]]
    for begin, found in ((b"", [b"", b"a", b"b"]), (b"\0", [b"a", b"b"]), (b"a\0", [b"b"]), (b"b", [b"b"]), (b"c", [])):
        assert tree.names(9, begin) == found and tree.names(1, begin=begin) == found[:1]
    with pytest.raises(ValueError, match="limit must not be negative"):
        tree.names(-1)

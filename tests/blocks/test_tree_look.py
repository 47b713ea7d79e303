"""What an index beside the tree asks of it: generations, ids in both tiers, shorter matches, looks without a pin."""

import numpy as np
import pytest

from kvpage import BlockPool, PrefixTree

B = 4


def filled(num_blocks=8, num_host_blocks=0, num_cached=3):
    pool, host = BlockPool(num_blocks), BlockPool(num_host_blocks)
    tree = PrefixTree(pool, B, host if num_host_blocks else None)
    tokens = list(range(num_cached * B))
    tree.release(tree.insert(tokens, pool.allocate(num_cached)))
    return pool, host, tree, tokens


def test_a_generation_is_odd_in_use_and_grows_with_each_change():
    pool = BlockPool(3)
    assert pool.generations([0, 1, 2]).tolist() == [0, 0, 0] and pool.generations([]).dtype == np.uint32
    ids = pool.allocate(2)
    pool.share(ids[:1])
    assert pool.generations([0, 1, 2]).tolist() == [1, 1, 0]
    pool.release([0, 1])
    assert pool.generations([0, 1, 2]).tolist() == [1, 2, 0]
    pool.release_one(0)
    assert pool.generations([0]).tolist() == [2] and pool.allocate_one() == 0
    assert pool.generations([0, 0]).tolist() == [3, 3]
    for wrong in ([3], [-1]):
        with pytest.raises(ValueError, match="block id must be between 0"):
            pool.generations(wrong)
    pool.check()


def test_ids_in_both_tiers():
    pool, host, tree, tokens = filled(num_host_blocks=2)
    pairs = dict(tree.demote(2)[1].tolist())
    match = tree.match(tokens, num_left_over=0)
    expected = [[0, -1, -1], [-1, pairs[1], pairs[2]]]
    for start in range(4):
        found = match.tier_block_ids(start)
        assert found.tolist() == [row[start:] for row in expected] and found.dtype == np.int32
    for wrong in (-1, 4):
        with pytest.raises(ValueError, match="start_block must be between 0 and num_blocks = 3"):
            match.tier_block_ids(wrong)
    tree.release(match)
    with pytest.raises(ValueError, match="released already"):
        match.tier_block_ids()


@pytest.mark.parametrize("num_blocks", range(4))
def test_a_match_can_be_shortened(num_blocks):
    pool, _, tree, tokens = filled()
    match = tree.match(tokens, num_left_over=0)
    tree.shorten(match, num_blocks)
    assert match.num_blocks == num_blocks and match.block_ids.tolist() == list(range(num_blocks))
    assert tree.num_evictable == 3 - num_blocks
    for wrong in (-1, num_blocks + 1):
        with pytest.raises(ValueError, match=f"between 0 and the match's {num_blocks}, got {wrong}"):
            tree.shorten(match, wrong)
    tree.check()
    tree.release(match)
    with pytest.raises(ValueError, match="released already"):
        tree.shorten(match, 0)


@pytest.mark.parametrize("shared", [0, 1, B - 1, B, B + 1, 3 * B - 1, 3 * B])
def test_a_look_tells_how_far_tokens_are_cached(shared):
    pool, _, tree, tokens = filled()
    ids, num_common, cached, _ = tree.look([*tokens[:shared], 99, 98])
    assert num_common == shared and cached == (shared if shared < 3 * B else None)
    assert ids.tolist() == [list(range(shared // B)), [-1] * (shared // B)]
    assert tree.num_evictable == 3 and tree.num_matches == 0
    ids, num_common, cached, _ = tree.look(tokens[:shared])
    assert num_common == shared and cached == (shared if shared < 3 * B else None)


def test_names():
    pool, _, tree, tokens = filled()
    tree.release(tree.insert(tokens[:B], pool.allocate(1), b"b"))
    tree.release(tree.insert(tokens[:B], pool.allocate(1), b"a"))
    tree.release(tree.match(tokens, b"nothing"))
    assert [tree.names(limit) for limit in range(4)] == [[], [b""], [b"", b"a"], [b"", b"a", b"b"]]
    with pytest.raises(ValueError, match="limit must not be negative"):
        tree.names(-1)

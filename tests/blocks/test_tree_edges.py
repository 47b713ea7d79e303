"""PrefixTree where the random lives beside a model do not look: its end, its refusals."""

import gc

import numpy as np
import pytest

from kvpage import BlockPool, PrefixTree

B = 2


def cache(tree: PrefixTree, pool: BlockPool, tokens: list[int]) -> None:
    tree.release(tree.insert(tokens, pool.allocate(len(tokens) // B)))


@pytest.mark.parametrize("has_host_tier", [False, True])
@pytest.mark.parametrize("early", [0, 1, 2])
def test_a_tree_that_ends_gives_its_blocks_back(has_host_tier, early):
    """In both tiers, also where only some blocks of an edge have one on the host."""
    pool, host_pool = BlockPool(8), BlockPool(8)
    tree = PrefixTree(pool, B, host_pool if has_host_tier else None)
    cache(tree, pool, [1, 2, 3, 4, 5, 6])
    cache(tree, pool, [1, 2, 7, 8])
    match = tree.match([1, 2, 3, 4, 5, 6, 0])
    if has_host_tier and early:
        tree.write_out(match, 0 if early == 1 else 2)
        tree.release(match)
        tree.demote(1)
    del match
    assert pool.num_free == 8 - tree.num_cached and host_pool.num_free == 8 - tree.num_host_cached
    del tree
    gc.collect()
    assert pool.num_free == host_pool.num_free == 8
    pool.check()
    host_pool.check()


def test_the_tiers_have_pools_of_their_own():
    pool = BlockPool(4)
    with pytest.raises(ValueError, match="host_pool must not be the device's pool"):
        PrefixTree(pool, B, pool)
    assert pool.num_free == 4


@pytest.mark.parametrize("priority", [-1, 8])
def test_priorities_beyond_the_classes(priority):
    pool = BlockPool(4)
    tree = PrefixTree(pool, B)
    with pytest.raises(ValueError, match=f"priority must be between 0 and 7, got {priority}"):
        tree.match([1, 2, 3], b"", priority)
    block_ids = pool.allocate(1)
    with pytest.raises(ValueError, match=f"priority must be between 0 and 7, got {priority}"):
        tree.insert([1, 2], block_ids, priority=priority)
    assert tree.num_matches == tree.num_cached == 0
    tree.check()


@pytest.mark.parametrize("call", ["evict", "demote", "evict_host"])
def test_fewer_than_no_blocks(call):
    pool = BlockPool(4)
    tree = PrefixTree(pool, B, BlockPool(4))
    cache(tree, pool, [1, 2])
    with pytest.raises(ValueError, match="num_blocks must not be negative, got -1"):
        getattr(tree, call)(-1)
    getattr(tree, call)(0)
    assert tree.num_cached == 1
    match = tree.match([1, 2, 3])
    with pytest.raises(ValueError, match="min_hits must not be negative, got -1"):
        tree.write_out(match, -1)
    tree.release(match)
    tree.check()


def half_demoted() -> tuple[BlockPool, BlockPool, PrefixTree]:
    """An edge of four blocks, of which the last two are on the host only."""
    pool, host_pool = BlockPool(8), BlockPool(8)
    tree = PrefixTree(pool, B, host_pool)
    cache(tree, pool, [1, 2, 3, 4, 5, 6, 7, 8])
    assert len(tree.demote(2)[1]) == 2
    return pool, host_pool, tree


@pytest.mark.parametrize("call", ["promote", "trim", "write_out", "pin", "release", "match_part"])
@pytest.mark.parametrize("other", ["released", "another tree's"])
def test_matches_that_hold_nothing_here(call, other):
    pool, _, tree = half_demoted()
    _, _, second = half_demoted()
    match = (tree if other == "released" else second).match([1, 2, 3, 4, 0])
    if other == "released":
        tree.release(match)
    arguments = {"promote": [pool.allocate(0)], "write_out": [0], "match_part": [[1, 2, 3, 4, 5]]}
    with pytest.raises(ValueError, match="match must be"):
        getattr(tree, call)(match, *arguments.get(call, []))
    tree.check()
    second.check()


@pytest.mark.parametrize("start", [0, 1, 2, 10, 2500, 4999, 5000])
def test_block_ids_of_a_long_edge_from_any_block(start):
    pool = BlockPool(5001)
    tree = PrefixTree(pool, 1)
    block_ids = pool.allocate(5000)[::-1].copy()
    match = tree.insert(np.arange(5000), block_ids)
    assert match.block_ids_from(start).tolist() == block_ids.tolist()[start:]
    twin = tree.match([*range(3000), -1])  # two edges now
    assert match.block_ids_from(start).tolist() == block_ids.tolist()[start:]
    assert twin.block_ids_from(min(start, 3000)).tolist() == block_ids.tolist()[start:3000]


NUM_LONG = 40
LONG = list(range(NUM_LONG * B))


def long_edge(num_demoted: int) -> tuple[BlockPool, PrefixTree]:
    """One of 40 blocks, whose last are on the host only."""
    pool = BlockPool(4 * NUM_LONG)
    tree = PrefixTree(pool, B, BlockPool(2 * NUM_LONG))
    cache(tree, pool, LONG)
    assert tree.demote(num_demoted)[0] == num_demoted
    return pool, tree


@pytest.mark.parametrize("call", ["promote", "insert"])
@pytest.mark.parametrize("num_demoted", [1, 20, NUM_LONG])
@pytest.mark.parametrize("is_refused", [False, True])
def test_an_edge_that_is_filled_keeps_no_room_that_it_does_not_need(call, num_demoted, is_refused):
    """tree.check knows how much an edge may keep. Refused is a block that somebody else holds, too."""
    pool, tree = long_edge(num_demoted)
    match = tree.match([*LONG, 0])
    block_ids = pool.allocate(num_demoted)
    if is_refused:
        pool.share(block_ids[-1:])
    if call == "insert":
        block_ids = np.concatenate([pool.allocate(NUM_LONG - num_demoted), block_ids])
    calls = {"promote": lambda: tree.promote(match, block_ids), "insert": lambda: tree.insert(LONG, block_ids)}
    if is_refused:
        with pytest.raises(ValueError, match="block"):
            calls[call]()
    else:
        calls[call]()
    assert match.num_device_blocks == NUM_LONG - is_refused * num_demoted
    tree.check()


def test_a_refused_insertion_keeps_no_room_in_what_it_would_have_filled_or_lengthened():
    pool, tree = long_edge(0)
    tail = list(range(1000, 1000 + NUM_LONG * B))
    cache(tree, pool, LONG + tail)  # lengthens the edge
    tree.release(tree.match([*LONG, 0]))  # cuts it in two
    assert tree.demote(2 * NUM_LONG)[0] == 2 * NUM_LONG
    block_ids = pool.allocate(2 * NUM_LONG)
    pool.share(block_ids[-1:])
    with pytest.raises(ValueError, match="block"):
        tree.insert(LONG + tail, block_ids)
    tree.check()
    cache(tree, pool, [7, 7])
    block_ids = pool.allocate(1 + NUM_LONG)
    pool.share(block_ids[-1:])
    with pytest.raises(ValueError, match="block"):
        tree.insert([7, 7] + tail, block_ids)
    tree.check()


def test_what_has_a_copy_makes_no_room_on_the_host():
    pool = BlockPool(4)
    tree = PrefixTree(pool, B, BlockPool(4))
    for tokens in ([1, 2, 3, 4], [5, 6, 7, 8]):
        cache(tree, pool, tokens)
        with_copies = tree.match([*tokens, 0])
        assert len(tree.write_out(with_copies)) == 2
        tree.release(with_copies)
    num_freed, pairs = tree.demote(2)
    assert (num_freed, len(pairs), tree.num_host_cached) == (2, 0, 4)
    assert tree.counts == (2, 0, 4, 0, 0)
    tree.check()


def test_an_edge_makes_room_of_its_own_copies_as_each_block_leaves():
    """Of four blocks the first and the third have copies, and the rest of the host is pinned. Three leave, the last one
    first: it takes the place of the first copy. The third has its copy. The second takes the place of the last."""
    pool, host_pool = BlockPool(8), BlockPool(3)
    tree = PrefixTree(pool, B, host_pool)
    tokens, pinned, dropped = [1, 2, 3, 4, 5, 6, 7, 8], [20, 21], [30, 31]
    cache(tree, pool, tokens[:6])
    for other in (pinned, dropped):
        cache(tree, pool, other)
    match = tree.match([*tokens[:6], 0])
    assert len(tree.write_out(match)) == 3
    tree.release(match)
    assert tree.demote(2)[0] == 2  # the others take the places of the first two copies
    assert tree.drop(dropped) == B
    pin = tree.match([*pinned, 0])
    cache(tree, pool, tokens)
    match = tree.match([*tokens, 0])
    assert len(tree.write_out(match)) == 1 and host_pool.num_free == 0
    ids = match.block_ids.tolist()
    tree.release(match)
    num_freed, pairs = tree.demote(3)
    assert num_freed == 3 and [device_id for device_id, _ in pairs.tolist()] == [ids[1]]
    match = tree.match([*tokens, 0])
    assert (match.num_blocks, match.num_device_blocks) == (3, 1)
    tree.release(pin)
    tree.check()


def test_a_copy_that_was_used_before_what_is_on_the_host_alone_leaves_the_host_first():
    """It stays on the device."""
    pool = BlockPool(8)
    tree = PrefixTree(pool, B, BlockPool(8))
    cache(tree, pool, [1, 2, 3, 4])
    assert tree.demote(2)[0] == 2
    cache(tree, pool, [5, 6, 7, 8])
    match = tree.match([5, 6, 7, 8, 0])
    assert len(tree.write_out(match)) == 2
    tree.release(match)
    tree.release(tree.match([1, 2, 3, 4, 0]))
    for num_copies in (1, 0):
        assert tree.evict_host(1) == 1
        assert (tree.num_cached, tree.num_host_cached) == (2, 2 + num_copies)
    match = tree.match([5, 6, 7, 8, 0])
    assert match.num_device_blocks == 2
    tree.release(match)
    assert tree.evict_host(3) == 2 and tree.num_cached == 2
    tree.check()

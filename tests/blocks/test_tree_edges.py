"""PrefixTree where the random lives beside a model do not look: its end, its refusals."""

import gc

import numpy as np
import pytest

from kvpage import BlockPool, PrefixTree
from kvpage.observe.tree_watch import ChangeKind, TreeChanges, before

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


def test_trim_ends_within_an_edge():
    pool, _, tree = half_demoted()
    match = tree.match([1, 2, 3, 4, 5, 6, 7, 8, 0])
    assert (match.num_blocks, match.num_device_blocks) == (4, 2)
    tree.trim(match)
    assert (match.num_blocks, match.num_device_blocks, match.num_tokens) == (2, 2, 4)
    assert len(match.block_ids) == 2 and tree.num_host_evictable == 2 and tree.num_evictable == 0
    tree.check()
    again = tree.match([1, 2, 3, 4, 5, 6, 7, 8, 0])
    assert (again.num_blocks, again.num_device_blocks) == (4, 2)
    tree.release(again)
    tree.release(match)
    tree.check()
    assert tree.num_evictable == 2


@pytest.mark.parametrize("num_ids", [0, 1, 2, 3])
def test_promote_fills_an_edge_from_where_it_is_on_the_device(num_ids):
    pool, host_pool, tree = half_demoted()
    match = tree.match([1, 2, 3, 4, 5, 6, 7, 8, 0])
    block_ids = pool.allocate(num_ids)
    if num_ids > 2:
        with pytest.raises(ValueError, match="block_ids must be at most one for each of 2 blocks"):
            tree.promote(match, block_ids)
    else:
        pairs = tree.promote(match, block_ids)
        assert pairs[:, 1].tolist() == block_ids.tolist() and len(set(pairs[:, 0].tolist())) == num_ids
        assert match.num_device_blocks == 2 + num_ids and tree.num_cached == 2 + num_ids
    tree.check()
    tree.release(match)
    tree.check()


@pytest.mark.parametrize("num_given", [2, 3, 4])
def test_insert_fills_an_edge_from_where_it_is_on_the_device(num_given):
    pool, host_pool, tree = half_demoted()
    block_ids = pool.allocate(num_given)
    tree.release(tree.insert([1, 2, 3, 4, 5, 6, 7, 8][: num_given * B], block_ids))
    assert tree.num_cached == num_given and pool.num_free == 8 - num_given
    tree.check()
    match = tree.match([1, 2, 3, 4, 5, 6, 7, 8, 0])
    assert match.num_device_blocks == num_given
    tree.release(match)
    match = tree.match([1, 2, 3, 4, 5, 6, 7, 8][: num_given * B] + [0])
    assert match.block_ids.tolist()[2:] == block_ids.tolist()[2:]


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


def test_a_released_match_has_no_blocks_on_the_device():
    _, _, tree = half_demoted()
    match = tree.match([1, 2, 3, 4, 0])
    assert match.num_device_blocks == 2
    tree.release(match)
    with pytest.raises(ValueError, match="match must be pinned, got one that is released already"):
        match.num_device_blocks  # noqa: B018


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


@pytest.mark.parametrize("named", range(8))
def test_the_trees_own_ids_may_be_named_beside_others(named):
    """Bit i: the ith block is named by the tree's id. The caller's other blocks are free then."""
    pool = BlockPool(8)
    tree = PrefixTree(pool, B)
    held = tree.insert([1, 2, 3, 4, 5, 6], pool.allocate(3))
    own = held.block_ids
    block_ids = [own[i] if named >> i & 1 else pool.allocate(1)[0] for i in range(3)]
    again = tree.insert([1, 2, 3, 4, 5, 6], block_ids)
    assert again.block_ids.tolist() == own.tolist() and pool.num_free == 5
    tree.check(owned_ids=[])


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


@pytest.mark.parametrize("call", ["promote", "insert"])
@pytest.mark.parametrize("num_filled", [0, 1, 2])
def test_a_path_of_two_edges_is_filled_from_where_it_is_on_the_device(call, num_filled):
    """Of the first edge's two blocks one is on the device; of the second edge's block nothing."""
    pool, host_pool = BlockPool(8), BlockPool(8)
    tree = PrefixTree(pool, B, host_pool)
    cache(tree, pool, [1, 2, 3, 4, 5, 6])
    cache(tree, pool, [1, 2, 3, 4, 7, 8])
    assert len(tree.demote(3)[1]) == 3
    match = tree.match([1, 2, 3, 4, 5, 6, 0])
    assert (match.num_blocks, match.num_device_blocks, tree.num_nodes) == (3, 1, 3)
    block_ids = pool.allocate(num_filled).tolist()
    if call == "promote":
        pairs = tree.promote(match, block_ids)
        assert pairs[:, 1].tolist() == block_ids and len(set(pairs[:, 0].tolist())) == num_filled
    else:
        tree.insert([1, 2, 3, 4, 5, 6][: B * (1 + num_filled)], [*pool.allocate(1), *block_ids])
    tree.check()
    assert match.num_device_blocks == 1 + num_filled and tree.num_cached == 1 + num_filled
    found = tree.match([1, 2, 3, 4, 5, 6][: B * (1 + num_filled)] + [0])
    assert found.block_ids.tolist()[1:] == block_ids


@pytest.mark.parametrize("num_host_blocks", [1, 2, 3, 4])
def test_what_is_dropped_leaves_the_host_also_around_a_gap(num_host_blocks):
    """The edge's last block is on both tiers, and as many of its first ones as there is room for."""
    pool, host_pool = BlockPool(8), BlockPool(num_host_blocks)
    tree = PrefixTree(pool, B, host_pool)
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    cache(tree, pool, tokens)
    assert len(tree.demote(1)[1]) == 1
    match = tree.match([*tokens, 0])
    tree.promote(match, pool.allocate(1))
    assert len(tree.write_out(match, 0)) == num_host_blocks - 1
    tree.release(match)
    tree.log_changes(1 << 20)
    tree.take_changes()
    assert tree.drop(tokens) == len(tokens)
    left = changes_of(tree)
    assert sorted(block_id for name, block_id, _ in left if name == "LEFT_HOST") == list(range(num_host_blocks))
    assert (pool.num_free, host_pool.num_free, tree.num_host_cached) == (8, num_host_blocks, 0)
    tree.check(owned_ids=[], owned_host_ids=[])


def test_without_a_host_tier_nothing_is_written_out():
    pool = BlockPool(4)
    tree = PrefixTree(pool, B)
    cache(tree, pool, [1, 2])
    match = tree.match([1, 2, 3])
    assert len(tree.write_out(match, 0)) == 0
    tree.release(match)
    freed, pairs = tree.demote(1)
    assert freed == 1 and len(pairs) == 0 and tree.num_cached == 0


def changes_of(tree: PrefixTree) -> list[tuple[str, int, int]]:
    changes = TreeChanges(*tree.take_changes()).changes.tolist()
    return [(ChangeKind(kind).name, block_id, value) for kind, block_id, value in changes]


def test_a_restart_tells_of_an_edge_in_both_tiers_block_by_block():
    pool, host_pool, tree = half_demoted()
    match = tree.match([1, 2, 3, 4, 5, 6, 7, 8, 0])
    first, second = pool.allocate(2).tolist()
    ((host_first, _),) = tree.promote(match, [first]).tolist()
    tree.release(match)
    tree.log_changes(1 << 20)
    changes = changes_of(tree)
    assert [name for name, _, _ in changes] == ["INSERTED", "INSERTED", "INSERTED", "WRITTEN", "INSERTED_HOST"]
    device = [block_id for name, block_id, _ in changes if name == "INSERTED"]
    assert [before(value) for name, _, value in changes if name == "INSERTED"] == [
        None,
        (True, device[0]),
        (True, device[1]),
    ]
    assert changes[3] == ("WRITTEN", host_first, first) and device[2] == first
    assert before(changes[4][2]) == (True, first)
    assert second not in device


def test_a_restart_chains_blocks_that_are_on_the_host_only():
    _, _, tree = half_demoted()
    tree.demote(2)
    tree.log_changes(1 << 20)
    changes = changes_of(tree)
    assert [name for name, _, _ in changes] == ["INSERTED_HOST"] * 4
    host = [block_id for _, block_id, _ in changes]
    assert [before(value) for _, _, value in changes] == [None, *((False, block_id) for block_id in host[:3])]


def test_what_leaves_the_host_after_a_gap_is_told():
    """Only the last two blocks of the edge have a copy there."""
    pool, host_pool, tree = half_demoted()
    match = tree.match([1, 2, 3, 4, 5, 6, 7, 8, 0])
    host_ids = tree.promote(match, pool.allocate(2))[:, 0].tolist()
    tree.release(match)
    tree.log_changes(1 << 20)
    tree.take_changes()
    assert tree.clear() == 4
    left = changes_of(tree)
    assert sorted(block_id for name, block_id, _ in left if name == "LEFT_HOST") == sorted(host_ids)
    assert [name for name, _, _ in left].count("LEFT_DEVICE") == 4 and len(left) == 6
    assert host_pool.num_free == 8

"""PrefixTree where the random lives beside a model do not look: its end, its refusals."""

import gc

import pytest

from kvpage import BlockPool, PrefixTree
from kvpage.tree_watch import ChangeKind, TreeChanges, before

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

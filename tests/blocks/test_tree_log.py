"""PrefixTree.take_changes: its bounds, times and refusals. Change by change: tests/observe/test_events_model.py."""

import numpy as np
import pytest

from kvpage import BlockPool, PrefixTree
from kvpage.observe.tree_watch import ChangeKind, TreeChanges, TreeWatch

B = 2


def make_tree(num_blocks: int = 8, num_host_blocks: int = 8, max_bytes: int = 1 << 20):
    pool, host_pool = BlockPool(num_blocks), BlockPool(num_host_blocks)
    tree = PrefixTree(pool, B, host_pool)
    tree.log_changes(max_bytes)
    return pool, host_pool, tree


def cache(tree: PrefixTree, pool: BlockPool, tokens: list[int], namespace: bytes = b"") -> None:
    tree.release(tree.insert(tokens, pool.allocate(len(tokens) // B), namespace))


def test_no_log_unless_asked_for():
    tree = PrefixTree(BlockPool(2), B)
    with pytest.raises(ValueError, match="log_changes must be called before take_changes"):
        tree.take_changes()
    tree.lose_changes()
    with pytest.raises(ValueError, match="max_bytes must not be negative, got -1"):
        tree.log_changes(-1)
    with pytest.raises(ValueError, match="log_changes must be called"):
        tree.take_changes()
    tree.log_changes(100)
    tree.take_changes()
    tree.log_changes(0)
    with pytest.raises(ValueError, match="log_changes must be called"):
        tree.take_changes()


def test_types_and_shapes():
    pool, _, tree = make_tree()
    is_restart, now, changes, tokens, namespaces = tree.take_changes()
    assert is_restart is True and now > 0 and namespaces == []
    assert changes.dtype == np.int64 and changes.shape == (0, 3)
    assert tokens.dtype == np.int32 and tokens.shape == (0, B)


@pytest.mark.parametrize("max_bytes, is_lost", [(24 + 8 + 32, False), (24 + 8 + 31, True)])
def test_the_bound(max_bytes, is_lost):
    pool, _, tree = make_tree(max_bytes=max_bytes)
    tree.take_changes()
    cache(tree, pool, [1, 2])
    changes = TreeChanges(*tree.take_changes())
    assert changes.is_restart == is_lost and changes.changes.tolist() == [[0, 0, -1]]
    assert not tree.take_changes()[0]


def test_when_a_block_was_last_used():
    pool, _, tree = make_tree()
    cache(tree, pool, [1, 2])
    tree.log_changes(1 << 20)
    begin = tree.take_changes()[1]
    tree.evict(1)
    assert tree.take_changes()[2].tolist() == [
        [ChangeKind.LEFT_DEVICE, 0, 0]
    ]  # its last use was before the log's begin
    cache(tree, pool, [1, 2])
    cached = tree.take_changes()[1]
    tree.evict(1)
    (_, _, used_at), = tree.take_changes()[2].tolist()  # fmt: skip
    assert begin < used_at < cached


def test_the_watch_tells_all_listeners():
    pool, _, tree = make_tree()
    with pytest.raises(ValueError, match="max_bytes must be a positive integer, got 0"):
        TreeWatch(tree, 0)
    watch = TreeWatch(tree)
    heard: list[list] = [[], []]
    watch.listeners += [heard[0].append, heard[1].append]
    cache(tree, pool, [1, 2])
    watch.poll()
    cache(tree, pool, [1, 2, 3, 4])
    watch.poll()
    watch.restart()
    watch.poll()
    assert [changes.is_restart for changes in heard[0]] == [True, False, True]
    assert [len(changes.changes) for changes in heard[0]] == [1, 1, 2]
    assert all(a is b for a, b in zip(*heard, strict=True))
    watch.close()
    with pytest.raises(ValueError, match="log_changes"):
        tree.take_changes()

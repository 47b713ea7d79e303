"""PrefixTree.entries: in order, bounded, and nothing changes by it. Beside a model: TreeLife."""

import threading

import numpy as np
import pytest
from support.tree_life import path_of

from kvpage import BlockPool, PrefixTree, TreeEntry

B = 2


def branching() -> tuple[BlockPool, PrefixTree]:
    pool = BlockPool(64)
    tree = PrefixTree(pool, B)
    for name in (b"", b"b", b"a"):
        for last in (5, 3, 4):
            tree.release(tree.insert([0, 1, 2, last], pool.allocate(2), name))
    return pool, tree


def names_and_paths(entries: list[TreeEntry]) -> list[tuple[bytes, tuple[int, ...]]]:
    return [path_of(entries, entry) for entry in entries]


def test_they_come_in_the_order_of_names_and_tokens():
    _, tree = branching()
    paths = names_and_paths(tree.entries(100))
    assert paths == sorted(paths) and len(paths) == 12
    assert [name for name, _ in paths] == [b""] * 4 + [b"a"] * 4 + [b"b"] * 4


def test_a_negative_limit_is_refused():
    with pytest.raises(ValueError, match="limit must not be negative, got -1"):
        PrefixTree(BlockPool(1), B).entries(-1)


def test_looking_changes_nothing():
    pool, tree = branching()
    match = tree.match([0, 1, 9])
    before = tree.num_evictable, tree.num_matches, tree.num_nodes, pool.num_free
    first, second = tree.entries(100), tree.entries(100)
    assert [entry.last_used for entry in first] == [entry.last_used for entry in second]
    assert (tree.num_evictable, tree.num_matches, tree.num_nodes, pool.num_free) == before
    first[0].tokens[:], first[0].block_ids[:] = -1, -1
    assert first[0].tokens.tolist() == [0, 1] and match.block_ids.tolist() == first[0].block_ids.tolist()
    tree.release(match)
    tree.clear()
    assert tree.entries(100) == [] and first[0].num_pins == 1
    tree.check(owned_ids=[])


def test_beside_other_threads():
    pool = BlockPool(256)
    tree = PrefixTree(pool, B)
    ended = threading.Event()
    failures: list[BaseException] = []

    def work(first: int) -> None:
        try:
            for i in range(400):
                tokens = np.array([0, 0, first, i % 7, i, i], np.int32)
                match = tree.match(tokens, num_left_over=0)
                num_new = 3 - match.num_blocks
                if pool.num_free < 16:
                    tree.evict(64)
                tree.release(tree.insert(tokens[match.num_tokens :], pool.allocate(num_new), after=match))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]

    def look() -> None:
        try:
            while not ended.is_set():
                paths = names_and_paths(tree.entries(1000))
                assert len(set(paths)) == len(paths)
        except BaseException as error:
            failures.append(error)

    looking = threading.Thread(target=look)
    for thread in (*threads, looking):
        thread.start()
    for thread in threads:
        thread.join()
    ended.set()
    looking.join()
    assert not failures
    tree.check(owned_ids=[])

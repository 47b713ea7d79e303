"""PrefixTree: namespaces, eviction, hashes that collide, threads."""

import random
import threading

import numpy as np
import pytest
from support.trees import B, cached, made, matched

from kvpage import BlockPool, PrefixTree

# --- namespaces, eviction -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hash_mask", [0, 1, 0xF])
def test_colliding_hashes_cost_time_only(hash_mask):
    pool, tree = made(300, 2, _hash_mask=hash_mask)
    rng = random.Random(hash_mask)
    order = list(range(100))
    paths = {i: cached(tree, pool, [i, i, i // 2, i]) for i in order}
    rng.shuffle(order)
    for i in order:
        assert matched(tree, [i, i, i // 2, i, 0]) == paths[i]
        assert matched(tree, [i, i + 1, 0]) == []
    tree.check(owned_ids=[])
    for num_left in range(199, -1, -1):  # the table closes every hole
        assert tree.evict(1) == 1
        tree.check(owned_ids=[])
        assert tree.num_cached == num_left
        if num_left % 20 == 0:
            alive = [i for i in order[(200 - num_left) // 2 :]]
            before = {i: paths[i] for i in alive}
            assert {i: matched(tree, [i, i, i // 2, i, 0]) for i in alive} == before


def test_edges_keep_no_memory_that_they_have_no_use_for():
    pool, tree = made(5000, 16)
    tokens = np.arange(4000 * 16)
    match = tree.match([])
    for block in range(0, 4000, 50):
        match = tree.insert(tokens[block * 16 : (block + 50) * 16], pool.allocate(50), after=match)
        tree.check()  # it knows what an edge may keep
    for cut in (3999, 1, 2000, 1000, 2, 3000, 999, 1001):
        tree.release(tree.match(tokens[: cut * 16 + 1]))
        tree.check()
    tree.release(match)
    while tree.evict(37):
        tree.check()
    assert pool.num_free == 5000


def test_check_knows_what_is_owned():
    pool, tree = made()
    cached(tree, pool, [1] * B)
    mine = pool.allocate(2)
    pool.share(mine[:1])
    tree.check(owned_ids=[1, 2, 1])
    for wrong, message in [
        ([1, 2], "block 1 has 2 references and 1 owners"),
        ([1, 1], "62 are|61 free . 1 cached . 1 owned blocks are not 64"),
        ([1, 1, 2, 0], "block 0 is owned and cached"),
        ([1, 1, 2, 9], "block 9 has 0 references and 1 owners"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            tree.check(owned_ids=wrong)


def test_threads_share_a_tree():
    pool, tree = made(1000)
    failures = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(1500):
            prompt = np.append(np.repeat(rng.choices(range(3), k=rng.randrange(6)), B), 0).astype(np.int64)
            match = tree.match(prompt, rng.choice([b"", b"x"]))
            num_new = len(prompt) // B - match.num_blocks
            ids = pool.allocate(num_new)
            rest = prompt[match.num_tokens : -1]
            match = tree.insert(rest, ids, after=match)
            if match.num_tokens != len(prompt) - 1 or any(pool.ref_count(i) != 1 for i in match.block_ids.tolist()):
                failures.append(prompt)
            tree.release(match)
            tree.evict(rng.randrange(4))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    tree.check(owned_ids=[])
    assert tree.num_evictable == tree.num_cached


def test_what_matches_alone_pin_is_asked_of_live_ones():
    tree, other = (PrefixTree(BlockPool(2), 1) for _ in range(2))
    released = tree.match([1])
    tree.release(released)
    for wrong in (released, other.match([1])):
        with pytest.raises(ValueError, match="match"):
            tree.num_pinned_only_by([tree.match([1]), wrong])
    for junk in ([None], [1], 3):
        with pytest.raises((TypeError, ValueError)):
            tree.num_pinned_only_by(junk)
    tree.check()

"""PrefixTree: its promises one by one. Random lives against a naive model: test_tree_life.py."""

import numpy as np
import pytest
import torch
from support.trees import B, cached, made, matched

from kvpage import BlockPool, PrefixTree

WIDTHS = [np.int32, np.int64]


def state(pool: BlockPool, tree: PrefixTree) -> tuple:
    tree.check()
    pool.check()
    counts = [pool.ref_count(i) for i in range(pool.num_blocks)]
    return pool.num_free, tree.num_cached, tree.num_evictable, tree.num_matches, tree.num_nodes, counts


# --- matching -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_a_match_ends_at_the_token_that_differs(block_size, width):
    num_blocks = 5000 // block_size
    rng = np.random.default_rng(block_size)
    tokens = rng.integers(-(2**31), 2**31, num_blocks * block_size, dtype=np.int64).astype(width)
    places = [0, 1, block_size, 2047, 2048, 2049, 4095, 4096, len(tokens) - 1]
    for place in [*places, *rng.integers(0, len(tokens), 20).tolist()]:
        pool, tree = made(num_blocks, block_size)
        tree.release(tree.insert(tokens, pool.allocate(num_blocks)))
        other = np.append(tokens, width(0))
        other[place] ^= 1
        assert matched(tree, other) == list(range(place // block_size))
        assert matched(tree, np.append(tokens, width(0))) == list(range(num_blocks))
        tree.check(owned_ids=[])


def test_ids_that_agree_in_their_low_bits_differ():
    pool, tree = made(block_size=1)
    cached(tree, pool, [5, -5])
    assert matched(tree, np.array([5, -5, 0], np.int64)) == [0, 1]
    for foreign in ([5, -5 + 2**32, 0], [5 + 2**32, 0], [5, 2**31, 0]):
        before = state(pool, tree)
        with pytest.raises(ValueError, match="tokens must fit into 32 bits, got"):
            tree.match(np.array(foreign, np.int64))
        assert state(pool, tree) == before


def test_a_match_reads_no_further_than_it_has_to():
    pool, tree = made()
    ids = cached(tree, pool, [1] * 2 * B)
    beyond = np.array([1] * 2 * B + [2] * B + [2**40] * B, np.int64)
    assert matched(tree, beyond) == ids
    with pytest.raises(ValueError, match=f"tokens must fit into 32 bits, got {2**40} at {2 * B}"):
        tree.match(np.append(beyond[: 2 * B], beyond[-B:]).tolist() + [0])


# --- pins -----------------------------------------------------------------------------------------------------------


def test_release_is_once():
    pool, tree = made()
    _, other = made()
    match = tree.insert([1] * B, pool.allocate(1))
    twin = tree.pin(match)
    with pytest.raises(ValueError, match="match must be of this tree"):
        other.release(match)
    with pytest.raises(ValueError, match="match must be of this tree"):
        other.pin(match)
    tree.release(match)
    before = state(pool, tree)
    for call in (lambda: tree.release(match), lambda: tree.pin(match), lambda: match.block_ids):
        with pytest.raises(ValueError, match="match must be pinned, got one that is released already"):
            call()
    assert state(pool, tree) == before and before[2] == 0
    assert (match.is_released, match.num_blocks, match.num_tokens) == (True, 1, B)
    assert not twin.is_released and twin.block_ids.tolist() == [0]
    tree.release(twin)
    assert tree.num_evictable == 1


# --- insertion ------------------------------------------------------------------------------------------------------


def test_a_duplicate_goes_back_and_the_trees_block_stands():
    pool, tree = made()
    cached(tree, pool, [1] * B)
    match = tree.insert([1] * B + [2] * B, pool.allocate(2))
    assert match.block_ids.tolist() == [0, 2] and pool.ref_count(1) == 0
    tree.check(owned_ids=[])


def test_a_conversation_grown_block_by_block_is_one_edge():
    pool, tree = made(300)
    match = tree.match([])
    for i in range(100):
        match = tree.insert([i] * B, pool.allocate(1), after=match)
        tree.check(owned_ids=[])
        assert match.num_blocks == i + 1 and match.block_ids_from(i).tolist() == [i]
    assert tree.num_nodes == 1
    tree.release(match)
    # and from the root: the path that is there is extended
    tree.release(tree.insert([i for i in range(150) for _ in range(B)], pool.allocate(150)))
    assert tree.num_nodes == 1 and tree.num_cached == 150
    tree.check(owned_ids=[])


REFUSED = [
    ([1] * (B - 1), [10], "tokens must fill the blocks: 1 blocks of 4 need 4 tokens, got 3"),
    ([1] * (B + 1), [10], "need 4 tokens, got 5"),
    ([1] * B, [], "need 0 tokens, got 4"),
    ([], [10], "need 4 tokens, got 0"),
    ([8] * B + [9] * (B - 1) + [2**31], [10, 11], "tokens must fit into 32 bits, got 2147483648 at 7"),
    ([8] * B + [-(2**31) - 1] * B, [10, 11], "tokens must fit into 32 bits, got -2147483649 at 4"),
    ([8] * 2 * B, [10, 64], "between 0 and num_blocks - 1 = 63, got 64"),
    ([8] * 2 * B, [10, -1], "got -1"),
    ([8] * 2 * B, [10, 30], "cannot cache block 30: no reference is left"),
    ([8] * 2 * B, [10, 10], "cannot cache block 10: it belongs to a prefix tree"),
    ([8] * 2 * B, [10, 12], "cannot cache block 12: it has 2 references"),
    ([8] * 2 * B, [10, 1], "cannot cache block 1: it belongs to a prefix tree"),
    ([1] * B + [8] * B, [1, 10], "cannot release block 1: it belongs to a prefix tree"),
    ([1] * B + [8] * B, [10, 10], "cannot release block 10: it belongs to a prefix tree"),
    ([1] * B + [8] * B, [30, 10], "cannot release block 30: no reference is left"),
    ([1] * B + [2] * B, [10, 10], "cannot release block 10: no reference is left"),
]


@pytest.mark.parametrize("namespace", [b"", b"new"])
@pytest.mark.parametrize("tokens, block_ids, message", REFUSED)
def test_a_refused_insert_changes_nothing(tokens, block_ids, message, namespace):
    pool, tree = made()
    cached(tree, pool, [1] * B + [2] * B)
    base = tree.insert([5] * B, pool.allocate(1))
    base = tree.insert([1] * B, pool.allocate(1), after=base)
    pool.allocate(10)
    pool.share([12])
    before = state(pool, tree)
    if namespace == b"":
        with pytest.raises(ValueError, match=message):
            tree.insert(np.array(tokens, np.int64), block_ids)
        assert state(pool, tree) == before
    new_only = message.replace("release block 1:", "cache block 1:").replace("release block 30", "cache block 30")
    new_only = new_only.replace("release block 10: no reference is left", "cache block 10: it belongs to a prefix tree")
    new_only = new_only.replace("release block 10", "cache block 10")
    with pytest.raises(ValueError, match=new_only):
        tree.insert(tokens, block_ids, b"new")
    with pytest.raises(ValueError, match=new_only):
        tree.insert(tokens, block_ids, after=base)
    assert state(pool, tree) == before
    assert not base.is_released and base.block_ids.tolist() == [2, 3]
    assert matched(tree, [1] * B + [2] * B + [0]) == [0, 1]
    assert tree.insert([6] * B, [11], after=base).block_ids.tolist() == [2, 3, 11]


def test_after_is_checked():
    pool, tree = made()
    _, other = made()
    match = tree.insert([1] * B, pool.allocate(1), b"ns")
    released = tree.pin(match)
    tree.release(released)
    mine = pool.allocate(1)
    before = state(pool, tree)
    with pytest.raises(ValueError, match="after must be pinned, got one that is released"):
        tree.insert([2] * B, mine, after=released)
    with pytest.raises(ValueError, match="after must be of this tree"):
        tree.insert([2] * B, mine, after=other.match([]))
    with pytest.raises(ValueError, match="namespace must be left out with after"):
        tree.insert([2] * B, mine, b"ns", match)
    assert state(pool, tree) == before and not match.is_released
    tree.release(tree.insert([2] * B, mine, after=match))
    assert match.is_released and matched(tree, [1] * B + [2] * B + [3], b"ns") == [0, 1]


def test_blocks_of_the_largest_size():
    pool, tree = made(block_size=2**31 - 1)
    with pytest.raises(ValueError, match="1 blocks of 2147483647 need 2147483647 tokens, got 2"):
        tree.insert([1, 2], pool.allocate(1))
    assert matched(tree, list(range(100))) == [] and tree.num_cached == 0


def test_arguments_are_checked():
    pool, tree = made()
    for bad in (0, -1):
        with pytest.raises(ValueError, match=f"block_size must be positive, got {bad}"):
            PrefixTree(pool, bad)
    for bad in (2**31, 2**62, 2**63 - 1):
        with pytest.raises(ValueError, match=f"block_size must be at most 2147483647, got {bad}"):
            PrefixTree(pool, bad)
    with pytest.raises(ValueError, match="num_blocks must not be negative, got -1"):
        tree.evict(-1)
    with pytest.raises(TypeError):
        tree.match([1], "a str")
    with pytest.raises(TypeError):
        PrefixTree(None, B)
    for tokens in (np.zeros(9), np.zeros((3, 3), int), np.arange(18)[::2], [0.5], torch.zeros(9)):
        with pytest.raises(ValueError, match="tokens must be"):
            tree.match(tokens)
        with pytest.raises(ValueError, match="tokens must be"):
            tree.insert(tokens, [0])
    assert state(pool, tree) == (64, 0, 0, 0, 0, [0] * 64)

"""BlockPool: who gets which block, and that a refused call changes nothing. Random lives: test_tree_life.py."""

import array

import numpy as np
import pytest
import torch

from kvpage import BlockPool, OutOfBlocks, PrefixTree


def state(pool: BlockPool) -> tuple[int, list[int]]:
    """All that can be seen of a pool, its next blocks included."""
    pool.check()
    counts = [pool.ref_count(i) for i in range(pool.num_blocks)]
    return pool.num_free, counts


def drain(pool: BlockPool) -> list[int]:
    return pool.allocate(pool.num_free).tolist()


def test_a_fresh_pool_hands_out_ascending_ids():
    pool = BlockPool(5)
    assert (pool.num_blocks, pool.num_free) == (5, 5)
    first = pool.allocate(2)
    assert first.dtype == np.int32 and first.tolist() == [0, 1]
    assert pool.allocate(0).tolist() == []
    assert pool.allocate_one() == 2
    assert pool.num_free == 2 and drain(pool) == [3, 4]


@pytest.mark.parametrize("num_blocks, n", [(0, 1), (1, 2), (4, 5), (4, 2**40)])
def test_out_of_blocks_names_both_numbers_and_changes_nothing(num_blocks, n):
    pool = BlockPool(num_blocks)
    with pytest.raises(OutOfBlocks, match=f"needed {n} blocks, {num_blocks} are free") as error:
        pool.allocate(n)
    assert (error.value.needed, error.value.free) == (n, num_blocks)
    assert drain(pool) == list(range(num_blocks))


REFUSED = [
    ("share", [0, 4], "cannot share block 4: no reference is left"),
    ("share", [0, 8], "between 0 and num_blocks - 1 = 7, got 8"),
    ("share", [0, -1], "between 0 and num_blocks - 1 = 7, got -1"),
    ("share", [0, 3], "cannot share block 3: it belongs to a prefix tree"),
    ("release", [4, 0], "cannot release block 4: no reference is left"),
    ("release", [0, 1, 0], "cannot release block 0: no reference is left"),
    ("release", [2, 2, 2], "cannot release block 2: no reference is left"),
    ("release", [8, 0, 1], "got 8"),
    ("release", [-1, 0, 1], "got -1"),
    ("release", [2**31, 0], "fit into 32 bits, got 2147483648"),
    ("release", [2**63, 0], "fit into 32 bits, got 9223372036854775808"),
    ("release", [3, 2, 2], "cannot release block 3: it belongs to a prefix tree"),
]


@pytest.mark.parametrize("verb, ids, message", REFUSED)
def test_a_refused_call_changes_nothing(verb, ids, message):
    pool = BlockPool(8)
    tree = PrefixTree(pool, 1)
    pool.allocate(4)
    pool.share([2])
    tree.insert([7], [3])
    before = state(pool)
    assert before == (4, [1, 1, 2, 1, 0, 0, 0, 0])
    with pytest.raises(ValueError, match=message):
        getattr(pool, verb)(ids)
    assert state(pool) == before
    assert drain(pool) == [4, 5, 6, 7]


def test_refused_single_calls():
    pool = BlockPool(2)
    for bad in (-1, 2):
        with pytest.raises(ValueError, match=f"between 0 and num_blocks - 1 = 1, got {bad}"):
            pool.ref_count(bad)
        with pytest.raises(ValueError, match=f"got {bad}"):
            pool.release_one(bad)
    with pytest.raises(ValueError, match="no reference is left"):
        pool.release_one(0)
    with pytest.raises(ValueError, match="n must not be negative, got -1"):
        pool.allocate(-1)
    assert state(pool) == (2, [0, 0])


@pytest.mark.parametrize("num_blocks", [-1, 2**31])
def test_num_blocks_is_checked(num_blocks):
    with pytest.raises(ValueError, match=f"num_blocks must be between 0 and .*, got {num_blocks}"):
        BlockPool(num_blocks)


KINDS = [
    list,
    tuple,
    lambda ids: np.array(ids, np.int32),
    lambda ids: np.array(ids, np.int64),
    lambda ids: array.array("i", ids),
    lambda ids: memoryview(array.array("q", ids)),
    lambda ids: torch.tensor(ids, dtype=torch.int32),
    lambda ids: [np.int32(i) for i in ids],
]


@pytest.mark.parametrize("kind", KINDS)
def test_ids_of_every_kind(kind):
    pool = BlockPool(4)
    pool.allocate(3)
    pool.share(kind([0, 2]))
    assert state(pool) == (1, [2, 1, 2, 0])
    pool.release(kind([0, 2, 1]))
    assert state(pool) == (2, [1, 0, 1, 0])
    pool.release(kind([]))
    assert state(pool) == (2, [1, 0, 1, 0])


NOT_IDS = [
    (np.array([0.0]), "must be int32 or int64, got float64"),
    ([0.5], "must be int32 or int64, got float64"),
    (np.array([0], np.uint32), "must be int32 or int64, got uint32"),
    (np.array([0], np.dtype(np.int32).newbyteorder()), "must be int32 or int64, got >i4"),
    (b"\0", "must be one-dimensional, got 0"),
    ("0", "must be one-dimensional, got 0"),
    (np.array([[0]]), "must be one-dimensional, got 2 dimensions"),
    (np.arange(4)[::2], "must be contiguous"),
    (np.arange(4)[::-1], "must be contiguous"),
    (np.frombuffer(bytes(9), np.int8)[1:].view(np.int32), "must be aligned"),
]


@pytest.mark.parametrize("ids, message", NOT_IDS)
def test_ids_of_no_kind(ids, message):
    pool = BlockPool(4)
    pool.allocate(4)
    with pytest.raises(ValueError, match=f"ids {message}"):
        pool.release(ids)
    assert state(pool) == (0, [1, 1, 1, 1])

"""How native methods take their arguments, and calls from many threads at once, long ones among them."""

import threading
from typing import Any

import numpy as np
import pytest

from kvpage import BlockPool, PrefixTree

B = 16


def test_the_argument_may_be_named():
    pool = BlockPool(8)
    assert pool.allocate(n=3).tolist() == [0, 1, 2]
    pool.share(ids=[0])
    pool.release(ids=[0, 1])
    assert [pool.ref_count(i) for i in range(3)] == [1, 0, 1]


@pytest.mark.parametrize("n", [True, np.int64(1), np.int8(1)])
def test_any_integer_is_one(n):
    ids = BlockPool(2).allocate(n)
    assert ids.tolist() == [0] and ids.dtype == np.int32 and ids.flags.owndata and ids.flags.writeable


WRONG: list[tuple[str, tuple[Any, ...], dict[str, Any], type[Exception]]] = [
    ("allocate", (), {}, TypeError),
    ("allocate", (1, 2), {}, TypeError),
    ("allocate", (1,), {"n": 1}, TypeError),
    ("allocate", (), {"count": 1}, TypeError),
    ("allocate", (1.0,), {}, TypeError),
    ("allocate", ("1",), {}, TypeError),
    ("allocate", (None,), {}, TypeError),
    ("allocate", (2**64,), {}, ValueError),
    ("allocate_one", (1,), {}, TypeError),
    ("share", (), {}, TypeError),
    ("release", ([1], [1]), {}, TypeError),
    ("release_one", (), {}, TypeError),
    ("release_one", (0.5,), {}, TypeError),
    ("release_one", (-(2**64),), {}, ValueError),
    ("release_one", (2**32,), {}, ValueError),
]


@pytest.mark.parametrize("name, args, named, error", WRONG)
def test_wrong_arguments_change_nothing(name, args, named, error):
    pool = BlockPool(4)
    pool.allocate(2)
    with pytest.raises(error):
        getattr(pool, name)(*args, **named)
    assert [pool.ref_count(i) for i in range(4)] == [1, 1, 0, 0]
    pool.check()


@pytest.mark.parametrize("name", ["allocate", "allocate_one", "share", "release", "release_one"])
def test_what_is_no_pool_is_refused(name):
    for other in (object(), PrefixTree(BlockPool(1), B)):
        with pytest.raises(TypeError, match="BlockPool"):
            getattr(BlockPool, name)(other, 1)


@pytest.mark.parametrize("num_tokens", [B, 4096, 2**17, 2**18 - B, 2**18, 2**18 + B])
def test_matches_of_every_size(num_tokens):
    """Whether the call keeps the GIL depends on it."""
    tokens = np.arange(num_tokens)
    pool = BlockPool(num_tokens // B)
    tree = PrefixTree(pool, B)
    tree.release(tree.insert(tokens, pool.allocate(num_tokens // B)))
    match = tree.match(tokens, num_left_over=0)
    assert np.array_equal(match.block_ids, np.arange(num_tokens // B))
    tree.release(match)
    tree.check(owned_ids=[])


def test_short_calls_beside_long_ones():
    """Threads that match, insert and evict while others check, clear and look at a whole tree."""
    pool = BlockPool(6000)
    tree = PrefixTree(pool, B)
    tokens = np.arange(4000 * B, dtype=np.int32)
    kept = tree.insert(tokens, pool.allocate(4000))
    ended = threading.Event()
    failures: list[BaseException] = []

    def guarded(call: Any) -> threading.Thread:
        def run() -> None:
            try:
                call()
            except BaseException as error:
                failures.append(error)

        return threading.Thread(target=run)

    def serve(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(150):
            length = int(rng.integers(1, 4000)) * B
            prompt = np.concatenate([tokens[:length], rng.integers(-9, 0, 3 * B).astype(np.int32)])
            match = tree.match(prompt)
            assert match.num_blocks >= length // B and match.num_device_blocks == match.num_blocks
            assert np.array_equal(match.block_ids[: length // B], np.arange(length // B))
            if pool.num_free < 100:
                tree.evict(50)
            ids = pool.allocate(len(prompt) // B - match.num_blocks)
            made = tree.insert(prompt[match.num_tokens :], ids, after=match)
            second = tree.pin(made)
            tree.release(made)
            assert made.is_released and not second.is_released
            tree.release(second)

    def look() -> None:
        while not ended.is_set():
            tree.check()
            assert tree.entries(3)
            assert tree.num_cached >= 4000 and tree.evict(5000) >= 0
            tree.clear()

    serving, looking = [guarded(lambda i=i: serve(i)) for i in range(3)], guarded(look)
    for thread in (*serving, looking):
        thread.start()
    for thread in serving:
        thread.join()
    ended.set()
    looking.join()
    assert not failures
    tree.release(kept)
    assert tree.num_matches == 0
    tree.clear()
    tree.check(owned_ids=[])

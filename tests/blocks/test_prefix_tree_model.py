"""Random lives of a pool and a tree beside their naive models: 200,000 operations, compared and checked after each.

A tiny alphabet and few blocks make prefixes meet, edges split, blocks run out, and duplicates come up all the time. The
models say which ids an allocation gets, so they also say which blocks every eviction freed, and in which order.
"""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.oracle import NaiveMatch, NaivePool, NaiveTree

from kvpage import BlockPool, Match, OutOfBlocks, PrefixTree

NUM_OPERATIONS = 25_000
LIVES = [  # seed, blocks, block size, bits of the children's hashes
    (1, 24, 1, 64),
    (2, 24, 2, 64),
    (3, 40, 2, 0),
    (4, 40, 3, 1),
    (5, 12, 2, 2),
    (6, 64, 1, 3),
    (7, 64, 2, 64),
    (8, 30, 4, 64),
]
NAMESPACES = [b"", b"", b"lora"]


class RandomLife:
    def __init__(self, seed: int, num_blocks: int, block_size: int, hash_bits: int) -> None:
        self.rng = random.Random(seed)
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.tree = PrefixTree(self.pool, block_size, _hash_mask=2**hash_bits - 1)
        self.naive_pool = NaivePool(num_blocks)
        self.naive_tree = NaiveTree(self.naive_pool, block_size)
        self.owned: list[int] = []  # an id for each reference
        self.matches: list[tuple[Match, NaiveMatch]] = []
        self.released: list[tuple[Match, NaiveMatch]] = []
        self.refusals: dict[str, int] = {}

    # --- what operations are made of ---

    def tokens(self, num_tokens: int) -> list[int]:
        if self.block_size == 1:
            return [self.rng.randrange(3) for _ in range(num_tokens)]
        return [int(self.rng.random() < 0.15) for _ in range(num_tokens)]

    def as_some_kind(self, tokens: list[int]) -> Any:
        kind = self.rng.randrange(3)
        return tokens if kind == 0 else np.array(tokens, np.int32 if kind == 1 else np.int64)

    def some_ids(self, n: int) -> list[int]:
        """Mostly owned and distinct, sometimes anything."""
        if self.rng.random() < 0.1:
            return [self.rng.randrange(-1, len(self.naive_pool.counts) + 1) for _ in range(n)]
        mine = list(dict.fromkeys(self.owned))
        return self.rng.sample(mine, min(n, len(mine)))

    def both(self, real: Callable[[], Any], naive: Callable[[], Any]) -> tuple[Any, Any] | None:
        """The two results, or None if both refuse in the same way."""
        try:
            expected = naive()
        except (ValueError, OutOfBlocks) as refusal:
            with pytest.raises(type(refusal)) as raised:
                real()
            if isinstance(refusal, OutOfBlocks):
                assert raised.value.args == refusal.args
            self.refusals[type(refusal).__name__] = self.refusals.get(type(refusal).__name__, 0) + 1
            return None
        return real(), expected

    def live_match(self) -> tuple[Match, NaiveMatch] | None:
        """Mostly a live one; now and then one that is released."""
        source = self.released if self.released and self.rng.random() < 0.05 else self.matches
        return self.rng.choice(source) if source else None

    def keep(self, results: tuple[Match, NaiveMatch] | None) -> None:
        if results is None:
            return
        match, naive = results
        assert match.num_blocks == len(naive.keys) and match.num_tokens == len(naive.tokens)
        self.compare_path(match, naive)
        self.matches.append((match, naive))
        while len(self.matches) > 6:
            self.release(self.rng.choice(self.matches))

    # --- operations ---

    def allocate(self) -> None:
        n = self.rng.randrange(7)
        results = self.both(lambda: self.pool.allocate(n).tolist(), lambda: self.naive_pool.allocate(n))
        if results:
            assert results[0] == results[1]
            self.owned += results[0]

    def share(self) -> None:
        ids = self.some_ids(self.rng.randrange(3))
        if self.both(lambda: self.pool.share(ids), lambda: self.naive_pool.share(ids)):
            self.owned += ids

    def release_ids(self) -> None:
        ids = self.some_ids(self.rng.randrange(5))
        if ids and self.rng.random() < 0.3:
            ids.append(self.rng.choice(ids))
        if self.both(lambda: self.pool.release(self.as_some_kind(ids)), lambda: self.naive_pool.release(ids)):
            for i in ids:
                self.owned.remove(i)

    def match(self) -> None:
        tokens = self.tokens(self.rng.randrange(7 * self.block_size))
        name = self.rng.choice(NAMESPACES)
        kind = self.as_some_kind(tokens)
        self.keep(self.both(lambda: self.tree.match(kind, name), lambda: self.naive_tree.match(tokens, name)))

    def pin(self) -> None:
        if found := self.live_match():
            match, naive = found
            self.keep(self.both(lambda: self.tree.pin(match), lambda: self.naive_tree.pin(naive)))

    def release(self, found: tuple[Match, NaiveMatch] | None = None) -> None:
        if found := found or self.live_match():
            match, naive = found
            if self.both(lambda: self.tree.release(match), lambda: self.naive_tree.release(naive)):
                self.retire(found)

    def retire(self, found: tuple[Match, NaiveMatch]) -> None:
        assert found[0].is_released
        self.matches.remove(found)
        self.released = [*self.released[-3:], found]

    def insert(self) -> None:
        after = self.live_match() if self.rng.random() < 0.6 else None
        num_blocks = self.rng.randrange(4)
        tokens = self.tokens(num_blocks * self.block_size + (self.rng.random() < 0.03))
        name = self.rng.choice(NAMESPACES) if not after or self.rng.random() < 0.03 else b""
        ids = self.ids_to_insert(tokens, num_blocks, name, after[1] if after else None)
        kind = self.as_some_kind(tokens)
        results = self.both(
            lambda: self.tree.insert(kind, ids, name, after[0] if after else None),
            lambda: self.naive_tree.insert(tokens, ids, name, after[1] if after else None),
        )
        if results is None:
            return
        for i in ids:
            if i in self.owned:  # the others were the tree's already
                self.owned.remove(i)
        if after:
            self.retire(after)
        self.keep(results)

    def ids_to_insert(self, tokens: list[int], num_blocks: int, name: bytes, after: NaiveMatch | None) -> list[int]:
        ids = self.some_ids(num_blocks)
        if self.rng.random() < 0.7:  # otherwise shared ones come in
            ids = [i for i in ids if self.owned.count(i) == 1]
        if len(ids) < num_blocks and self.naive_pool.free:
            new = self.pool.allocate(min(num_blocks - len(ids), self.pool.num_free)).tolist()
            assert new == self.naive_pool.allocate(len(new))
            self.owned += new
            ids += new
        if self.rng.random() < 0.3:  # the tree's own ids, where it has them
            name = after.namespace if after else name
            keys = self.naive_tree.keys(name, after.tokens if after else (), tokens)
            for at, key in enumerate(keys[: len(ids)]):
                ids[at] = self.naive_tree.blocks[key].id if key in self.naive_tree.blocks else ids[at]
        return ids

    def evict(self) -> None:
        n = self.rng.randrange(5)
        results = self.both(lambda: self.tree.evict(n), lambda: self.naive_tree.evict(n))
        assert results and results[0] == results[1]

    def clear(self) -> None:
        if self.rng.random() < 0.05:
            assert self.tree.clear() == self.naive_tree.clear()

    # --- comparing ---

    def compare_path(self, match: Match, naive: NaiveMatch) -> None:
        assert match.block_ids.tolist() == naive.block_ids
        start = self.rng.randrange(len(naive.keys) + 1)
        assert match.block_ids_from(start).tolist() == naive.block_ids[start:]

    def compare(self) -> None:
        self.pool.check()
        self.tree.check(self.owned)
        assert self.pool.num_free == len(self.naive_pool.free)
        assert self.tree.num_cached == len(self.naive_tree.blocks)
        assert self.tree.num_evictable == len(self.naive_tree.unpinned)
        assert self.tree.num_matches == len(self.matches)
        assert list(map(self.pool.ref_count, range(self.pool.num_blocks))) == self.naive_pool.counts
        if self.matches:
            self.compare_path(*self.rng.choice(self.matches))

    def step(self) -> None:
        operations = [self.allocate, self.share, self.release_ids, self.match, self.pin, self.release, self.insert]
        weights = [3, 1, 3, 4, 1, 4, 8, 2, 1]
        self.rng.choices([*operations, self.evict, self.clear], weights)[0]()
        self.compare()


@pytest.mark.parametrize("seed, num_blocks, block_size, hash_bits", LIVES)
def test_random_life(seed, num_blocks, block_size, hash_bits):
    print(f"{seed=}")
    life = RandomLife(seed, num_blocks, block_size, hash_bits)
    most_nodes = 0
    for step in range(NUM_OPERATIONS):
        try:
            life.step()
        except BaseException:
            print(f"{step=}")
            raise
        most_nodes = max(most_nodes, life.tree.num_nodes)
    assert most_nodes > 5 and life.refusals["ValueError"] > 100 and life.refusals["OutOfBlocks"] > 100
    for found in list(life.matches):
        life.release(found)
    life.tree.clear()
    life.pool.release(life.owned)
    assert life.pool.num_free == num_blocks

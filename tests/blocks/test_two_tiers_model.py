"""Random lives of a tree with two tiers beside its naive model, with a memory that remembers what was copied where.

Every pair that the tree returns is carried out at once, so a match that names a block whose content is another key's,
or one that was overwritten, is found by its content.
"""

import random

import pytest
from support.oracle import NaivePool
from support.tier_oracle import Host, TierMatch, TierTree

from kvpage import BlockPool, Match, OutOfBlocks, PrefixTree

NUM_OPERATIONS = 12_000
LIVES = [  # seed, device blocks, host blocks, block size, bits of the children's hashes
    (1, 16, 16, 1, 64),
    (2, 16, 40, 2, 64),
    (3, 24, 6, 2, 0),
    (4, 10, 3, 2, 2),
    (5, 12, 0, 2, 64),
    (6, 8, 64, 3, 64),
    (7, 20, 20, 4, 1),
]
NAMESPACES = [b"", b"", b"lora"]


class TwoTierLife:
    def __init__(self, seed: int, num_blocks: int, num_host_blocks: int, block_size: int, hash_bits: int) -> None:
        self.rng = random.Random(seed)
        self.block_size = block_size
        self.pool, self.host_pool = BlockPool(num_blocks), BlockPool(num_host_blocks)
        self.tree = PrefixTree(self.pool, block_size, self.host_pool, _hash_mask=2**hash_bits - 1)
        self.naive_pool = NaivePool(num_blocks)
        self.naive = TierTree(self.naive_pool, block_size, num_host_blocks)
        self.owned: list[int] = []
        self.matches: list[tuple[Match, TierMatch]] = []
        self.device_memory: dict[int, object] = {}
        self.host_memory: dict[int, object] = {}
        self.real_host: dict[int, int] = {}  # by Host.number
        self.counts = dict.fromkeys(["promoted", "demoted", "parts", "refused", "forgotten", "kept"], 0)

    def tokens(self, num_tokens: int) -> list[int]:
        if self.block_size == 1:
            return [self.rng.randrange(3) for _ in range(num_tokens)]
        return [int(self.rng.random() < 0.2) for _ in range(num_tokens)]

    def both(self, real, naive):
        try:
            expected = naive()
        except (ValueError, OutOfBlocks) as refusal:
            with pytest.raises(type(refusal)):
                real()
            self.counts["refused"] += 1
            return None
        return real(), expected

    def keep(self, results) -> None:
        if results is None:
            return
        match, naive = results
        self.compare_path(match, naive)
        self.matches.append((match, naive))
        while len(self.matches) > 5:
            self.release()

    # --- carrying out ---

    def to_host(self, real_pairs, naive_pairs) -> None:
        assert [pair[0] for pair in real_pairs.tolist()] == [device for device, _ in naive_pairs]
        for (device, host_id), (_, host) in zip(real_pairs.tolist(), naive_pairs, strict=True):
            self.host_memory[host_id] = self.device_memory[device]
            self.real_host[host.number] = host_id
        self.counts["demoted"] += len(naive_pairs)

    def to_device(self, real_pairs, naive_pairs: list[tuple[Host, int]]) -> None:
        assert real_pairs.tolist() == [[self.real_host[host.number], device] for host, device in naive_pairs]
        for host_id, device in real_pairs.tolist():
            self.device_memory[device] = self.host_memory[host_id]
        self.counts["promoted"] += len(naive_pairs)

    # --- operations ---

    def allocate(self) -> None:
        n = self.rng.randrange(5)
        if results := self.both(lambda: self.pool.allocate(n).tolist(), lambda: self.naive_pool.allocate(n)):
            assert results[0] == results[1]
            self.owned += results[0]
            for i in results[0]:
                self.device_memory[i] = ("owned", i)

    def release_ids(self) -> None:
        ids = self.rng.sample(self.owned, self.rng.randrange(len(self.owned) + 1))
        self.pool.release(ids)
        self.naive_pool.release(ids)
        self.owned = [i for i in self.owned if i not in ids]

    def match(self) -> None:
        tokens = self.tokens(self.rng.randrange(8 * self.block_size))
        name, priority = self.rng.choice(NAMESPACES), self.rng.choice([0, 0, 0, 1, 7])
        self.keep(
            self.both(lambda: self.tree.match(tokens, name, priority), lambda: self.naive.match(tokens, name, priority))
        )

    def match_part(self) -> None:
        if not self.matches:
            return
        match, naive = self.rng.choice(self.matches)
        tokens = [*naive.tokens, *self.tokens(self.rng.randrange(2 * self.block_size))]
        part, most = self.tree.match_part(match, tokens), self.naive.match_part(naive, tokens)
        if part is None:
            assert most in (0, self.block_size)
            return
        assert part.num_tokens == most < self.block_size
        memory = self.device_memory if part.is_on_device else self.host_memory
        namespace, path = memory[part.block_id]
        assert (
            namespace == naive.namespace
            and path[: len(naive.tokens) + most] == tuple(tokens)[: len(naive.tokens) + most]
        )
        self.tree.check()
        key = next(k for k in self.naive.blocks if k == (namespace, path))
        # The real one pins the whole node: as last used as its blocks are, so the model does the same from the end.
        below = [k for k in self.naive.blocks if k[0] == namespace and k[1][: len(path)] == path]
        pinned = self.tree_path(part.match, key, below)
        self.naive.release(self.naive.pinned(namespace, pinned, 0))
        self.tree.release(part.match)
        self.counts["parts"] += 1

    def tree_path(self, match: Match, key, below) -> list:
        """The keys of the pinned path: along `key` to the end of its edge, which has match.num_blocks blocks."""
        size = match.num_blocks * self.block_size
        ends = [k for k in below if len(k[1]) == size]
        assert len(ends) == 1  # an edge does not fork
        return self.naive.keys(key[0], (), ends[0][1])

    def pin(self) -> None:
        if self.matches:
            match, naive = self.rng.choice(self.matches)
            self.keep(self.both(lambda: self.tree.pin(match), lambda: self.naive.pin(naive)))

    def release(self) -> None:
        if self.matches:
            match, naive = self.matches.pop(self.rng.randrange(len(self.matches)))
            self.tree.release(match)
            self.naive.release(naive)
            assert match.is_released

    def trim(self) -> None:
        if self.matches:
            match, naive = self.rng.choice(self.matches)
            self.tree.trim(match)
            self.naive.trim(naive)
            self.compare_path(match, naive)

    def promote(self) -> None:
        if not self.matches:
            return
        match, naive = self.rng.choice(self.matches)
        ids = self.rng.sample(self.owned, min(len(self.owned), self.rng.randrange(4)))
        if self.rng.random() < 0.8:
            ids = ids[: len(naive.keys) - self.naive.on_device(naive.keys)]
        results = self.both(lambda: self.tree.promote(match, ids), lambda: self.naive.promote(naive, ids))
        if results is not None:
            self.owned = [i for i in self.owned if i not in ids]
            self.to_device(*results)

    def write_out(self) -> None:
        if self.matches:
            match, naive = self.rng.choice(self.matches)
            results = self.both(lambda: self.tree.write_out(match), lambda: self.naive.write_out(naive))
            self.to_host(*results)

    def insert(self) -> None:
        found = self.rng.choice(self.matches) if self.matches and self.rng.random() < 0.6 else None
        after, naive_after = found or (None, None)
        num_blocks = self.rng.randrange(4)
        tokens = self.tokens(num_blocks * self.block_size)
        name = b"" if found else self.rng.choice(NAMESPACES)
        priority = 0 if found else self.rng.choice([0, 0, 2])
        while len(self.owned) < num_blocks and self.naive_pool.free:
            self.allocate()
        ids = self.rng.sample(self.owned, min(num_blocks, len(self.owned)))
        written = {i: key for key, i in zip(self.keys_of(naive_after, name, tokens), ids, strict=False)}
        held = {key: self.naive.blocks[key].device for key in written.values() if key in self.naive.blocks}
        results = self.both(
            lambda: self.tree.insert(tokens, ids, name, after, priority),
            lambda: self.naive.insert(tokens, ids, name, naive_after, priority),
        )
        if results is None:
            return
        for i, key in written.items():
            self.counts["kept"] += held.get(key, 0) is None
            if held.get(key) is None:
                self.device_memory[i] = key
        self.owned = [i for i in self.owned if i not in ids]
        if found:
            self.matches.remove(found)
        self.keep(results)

    def keys_of(self, after, name, tokens):
        return self.naive.keys(after.namespace if after else name, after.tokens if after else (), tokens)

    def evict(self) -> None:
        n = self.rng.randrange(5)
        assert self.tree.evict(n) == self.naive.leave(n, False)[0]

    def demote(self) -> None:
        n = self.rng.randrange(6)
        num_blocks = len(self.naive.blocks)
        num_freed, pairs = self.tree.demote(n)
        expected, naive_pairs = self.naive.leave(n, True)
        assert num_freed == expected
        self.to_host(pairs, naive_pairs)
        self.counts["forgotten"] += num_blocks - len(self.naive.blocks)

    def evict_host(self) -> None:
        n = self.rng.randrange(3)
        assert self.tree.evict_host(n) == self.naive.evict_host(n)

    def drop(self) -> None:
        tokens, name = self.tokens(self.rng.randrange(5 * self.block_size)), self.rng.choice(NAMESPACES)
        assert self.tree.drop(tokens, name) == self.naive.drop(tokens, name)

    def clear(self) -> None:
        if self.rng.random() < 0.1:
            assert self.tree.clear() == self.naive.clear()

    # --- comparing ---

    def compare_path(self, match: Match, naive: TierMatch) -> None:
        assert match.num_blocks == len(naive.keys) and match.priority == naive.priority
        assert match.num_device_blocks == self.naive.on_device(naive.keys)
        if match.num_device_blocks < match.num_blocks:
            with pytest.raises(ValueError, match="match must be on the device"):
                _ = match.block_ids
            return
        assert match.block_ids.tolist() == [self.naive.blocks[key].device for key in naive.keys]
        assert [self.device_memory[i] for i in match.block_ids.tolist()] == naive.keys

    def compare(self) -> None:
        self.tree.check(self.owned, [])
        blocks = self.naive.blocks
        assert self.tree.num_cached == sum(block.device is not None for block in blocks.values())
        assert self.tree.num_host_cached == sum(block.host is not None for block in blocks.values())
        assert self.tree.num_evictable == sum(blocks[key].device is not None for key in self.naive.used)
        assert self.tree.num_host_evictable == sum(blocks[key].host is not None for key in self.naive.used)
        assert self.host_pool.num_free == self.naive.num_free_host
        assert list(map(self.pool.ref_count, range(self.pool.num_blocks))) == self.naive_pool.counts
        for key, block in blocks.items():
            assert block.device is None or self.device_memory[block.device] == key
            assert block.host is None or self.host_memory[self.real_host[block.host.number]] == key
        for found in self.matches:
            self.compare_path(*found)

    def step(self) -> None:
        weights = {
            self.allocate: 3, self.release_ids: 1, self.match: 5, self.match_part: 2, self.pin: 1, self.release: 4,
            self.trim: 1, self.promote: 3, self.write_out: 1, self.insert: 8, self.evict: 1, self.demote: 5,
            self.evict_host: 1, self.drop: 1, self.clear: 1,
        }  # fmt: skip
        self.rng.choices(list(weights), list(weights.values()))[0]()
        self.compare()


@pytest.mark.parametrize("seed, num_blocks, num_host_blocks, block_size, hash_bits", LIVES)
def test_random_life_of_two_tiers(seed, num_blocks, num_host_blocks, block_size, hash_bits):
    print(f"{seed=}")
    life = TwoTierLife(seed, num_blocks, num_host_blocks, block_size, hash_bits)
    for step in range(NUM_OPERATIONS):
        try:
            life.step()
        except BaseException:
            print(f"{step=}")
            raise
    assert life.counts["refused"] > 50 and (block_size == 1 or life.counts["parts"] > 20)
    if num_host_blocks:
        assert min(life.counts[name] for name in ("promoted", "demoted", "kept")) >= 5, life.counts
    while life.matches:
        life.release()
    life.tree.clear()
    life.pool.release(life.owned)
    assert life.pool.num_free == num_blocks and life.host_pool.num_free == num_host_blocks

"""Random operations on pools, a tree with two tiers, and a block manager: after each, free, cached and owned blocks
make up the tiers, and whatever a match names holds what was written for just these tokens."""

import random
from collections import Counter

import numpy as np
from battery import Advance, Battery, Figures
from blocks.test_block_manager import B, RandomLife
from support.whim import Whim

from kvpage import BlockPool, Match, OutOfBlocks, PrefixTree
from kvpage.blocks.space import HostPolicy

Path = tuple[bytes, tuple[int, ...]]  # a namespace and tokens

NAMES = (b"", b"", b"lora")
MOST_MATCHES, CHECK_EVERY, LIFE = 6, 256, 20_000
WORLDS = [(16, 16, 1), (16, 40, 2), (24, 6, 2), (10, 3, 2), (12, 0, 2), (8, 64, 3), (200, 300, 4)]
MANAGERS = [(0, None), (12, None), (60, None), (40, 0), (40, 2)]  # host blocks, after how many hits they are written


class TreeLife:
    def __init__(self, seed: int, num_blocks: int, num_host_blocks: int, block_size: int) -> None:
        self.rng, self.block_size = random.Random(seed), block_size
        self.pool, self.host_pool = BlockPool(num_blocks), BlockPool(num_host_blocks)
        self.tree = PrefixTree(self.pool, block_size, self.host_pool if num_host_blocks else None)
        self.owned: Counter[int] = Counter()
        self.matches: list[tuple[Match, Path]] = []
        self.memory: dict[int, Path] = {}
        self.host_memory: dict[int, Path] = {}
        self.num_demoted = self.num_promoted = self.num_matched = 0
        self.operations = [self.allocate, self.release_ids, self.share, self.match, self.pin, self.release, self.trim]
        self.operations += [self.promote, self.write_out, self.insert, self.evict, self.demote, self.evict_host]
        self.operations += [self.drop]
        self.weights = [4, 2, 1, 6, 1, 5, 1, 3, 1, 8, 1, 5, 1, 1]

    def live(self, count: int) -> None:
        for i, operation in enumerate(self.rng.choices(self.operations, self.weights, k=count)):
            operation()
            self.check_conserved()
            if i % CHECK_EVERY == 0:
                self.check()
        self.check()
        self.end()

    # --- what must hold ---

    def check_conserved(self) -> None:
        pool, tree = self.pool, self.tree
        assert pool.num_free + tree.num_cached + len(self.owned) == pool.num_blocks
        assert self.host_pool.num_free + tree.num_host_cached == self.host_pool.num_blocks
        assert tree.num_matches == len(self.matches)

    def check(self) -> None:
        self.pool.check()
        self.tree.check(list(self.owned.elements()), [])
        for match, path in self.matches:
            self.check_path(match, path)

    def check_path(self, match: Match, path: Path) -> None:
        assert match.num_tokens == len(path[1])
        if match.num_device_blocks == match.num_blocks:
            assert [self.memory[i] for i in match.block_ids.tolist()] == self.paths(*path)

    def paths(self, name: bytes, tokens: tuple[int, ...]) -> list[Path]:
        size = self.block_size
        return [(name, tokens[:end]) for end in range(size, len(tokens) + 1, size)]

    def end(self) -> None:
        while self.matches:
            self.release()
        self.tree.clear()
        self.pool.release(list(self.owned.elements()))
        assert self.pool.num_free == self.pool.num_blocks and self.host_pool.num_free == self.host_pool.num_blocks

    # --- what operations are made of ---

    def tokens(self, num_tokens: int) -> tuple[int, ...]:
        most = 3 if self.block_size == 1 else 2
        bits = self.rng.getrandbits(32)
        return tuple((bits >> 4 * i & 15) % most if bits >> 4 * i & 8 else 0 for i in range(num_tokens))

    def name(self) -> bytes:
        return self.rng.choice(NAMES)

    def some_ids(self, count: int) -> list[int]:
        mine = list(self.owned)
        return self.rng.sample(mine, min(count, len(mine)))

    def alone(self, count: int) -> list[int]:
        """Blocks that this one alone owns, some of them new."""
        ids = [i for i in self.some_ids(count) if self.owned[i] == 1]
        lacking = min(count - len(ids), self.pool.num_free)
        return ids + self.take(lacking) if lacking > 0 else ids

    def take(self, count: int) -> list[int]:
        ids = self.pool.allocate(count).tolist()
        assert not any(i in self.owned for i in ids)
        self.owned.update(ids)
        self.memory.update((i, (b"nobody's", ())) for i in ids)
        return ids

    def keep(self, match: Match, path: Path) -> None:
        self.check_path(match, path)
        self.matches.append((match, path))
        if len(self.matches) > MOST_MATCHES:
            self.release()

    def some_match(self) -> tuple[Match, Path] | None:
        return self.rng.choice(self.matches) if self.matches else None

    def disown(self, ids: list[int]) -> None:
        for i in ids:
            self.owned[i] -= 1
            if not self.owned[i]:
                del self.owned[i]

    # --- operations ---

    def allocate(self) -> None:
        count = self.rng.randrange(6)
        try:
            self.take(count)
        except OutOfBlocks as error:
            assert error.needed == count > error.free == self.pool.num_free

    def release_ids(self) -> None:
        ids = self.some_ids(self.rng.randrange(6))
        self.pool.release(ids)
        self.disown(ids)

    def share(self) -> None:
        ids = self.some_ids(self.rng.randrange(3))
        self.pool.share(ids)
        self.owned.update(ids)

    def match(self) -> None:
        tokens, name = self.tokens(self.rng.randrange(8 * self.block_size) % 32), self.name()
        match = self.tree.match(np.array(tokens, np.int32), name, self.rng.choice((0, 0, 0, 5)))
        assert match.num_tokens < max(len(tokens), 1)
        self.num_matched += match.num_blocks
        self.keep(match, (name, tokens[: match.num_tokens]))

    def pin(self) -> None:
        if found := self.some_match():
            self.keep(self.tree.pin(found[0]), found[1])

    def release(self) -> None:
        if self.matches:
            match, path = self.matches.pop(self.rng.randrange(len(self.matches)))
            self.check_path(match, path)
            self.tree.release(match)

    def trim(self) -> None:
        if self.matches:
            match, (name, tokens) = self.matches.pop(self.rng.randrange(len(self.matches)))
            self.tree.trim(match)
            assert match.num_device_blocks == match.num_blocks
            self.keep(match, (name, tokens[: match.num_tokens]))

    def promote(self) -> None:
        if found := self.some_match():
            match, path = found
            pairs = self.tree.promote(match, self.alone(match.num_blocks - match.num_device_blocks)).tolist()
            self.disown([device for _, device in pairs])
            self.memory.update((device, self.host_memory[host]) for host, device in pairs)
            self.num_promoted += len(pairs)
            self.check_path(match, path)

    def write_out(self) -> None:
        if found := self.some_match():
            self.to_host(self.tree.write_out(found[0]).tolist())

    def to_host(self, pairs: list[list[int]]) -> None:
        self.host_memory.update([(host, self.memory[device]) for device, host in pairs])
        self.num_demoted += len(pairs)

    def insert(self) -> None:
        after = self.some_match() if self.rng.random() < 0.6 else None
        if after and after[0].num_device_blocks < after[0].num_blocks:
            return
        ids = self.alone(self.rng.randrange(4))
        tokens = self.tokens(len(ids) * self.block_size)
        name, before = after[1] if after else (self.name(), ())
        path = name, before + tokens
        self.memory.update(zip(ids, self.paths(*path)[len(before) // self.block_size :], strict=True))
        if after:
            self.matches.remove(after)
        match = self.tree.insert(tokens, ids, b"" if after else name, after[0] if after else None)
        self.disown(ids)
        self.keep(match, path)

    def evict(self) -> None:
        self.tree.evict(self.rng.randrange(4))

    def demote(self) -> None:
        self.to_host(self.tree.demote(self.rng.randrange(6))[1].tolist())

    def evict_host(self) -> None:
        self.tree.evict_host(self.rng.randrange(3))

    def drop(self) -> None:
        self.tree.drop(self.tokens(self.rng.randrange(5 * self.block_size)), self.name())


class ManagerLife(RandomLife):
    """Every slot that a sequence reads is compared now and then, who owns which block after each step."""

    def live(self, count: int) -> None:
        compare = self.model.verify
        for i in range(count):
            self.model.verify = compare if i % 64 == 63 else self.check_conserved  # type: ignore[method-assign]
            self.step()
        compare()

    def check_conserved(self) -> None:
        self.model.do_moves()
        space = self.manager.space
        sequences = self.manager._sequences
        owned = {i for seq_id in self.model.written for i in sequences.own_ids(seq_id).tolist()}
        num_swapped = sum(len(sequences.swapped[seq_id].host_ids) for seq_id in self.swapped)
        assert space.pool.num_free + space.tree.num_cached + len(owned) == space.pool.num_blocks
        assert space.host_pool.num_free + space.tree.num_host_cached + num_swapped == space.host_pool.num_blocks


def run_trees(seed: int, count: int, advance: Advance) -> Figures:
    figures: Figures = {"matched_blocks": 0, "demoted_blocks": 0, "promoted_blocks": 0}
    for i, begin in enumerate(range(0, count, LIFE)):
        num_steps = min(LIFE, count - begin)
        life = TreeLife((seed << 32) + i, *WORLDS[i % len(WORLDS)])
        life.live(num_steps)
        for name, num_blocks in zip(figures, (life.num_matched, life.num_demoted, life.num_promoted), strict=True):
            figures[name] += num_blocks
        advance(num_steps)
    return figures


def run_managers(seed: int, count: int, advance: Advance) -> Figures:
    figures: Figures = {"refused": 0, "swapped_blocks": 0}
    for i, begin in enumerate(range(0, count, LIFE // 4)):
        num_steps = min(LIFE // 4, count - begin)
        num_host_blocks, after_hits = MANAGERS[i % len(MANAGERS)]
        options = {"num_host_blocks": num_host_blocks, "host_policy": HostPolicy(after_hits), "pin_quota": 8}
        life = ManagerLife((seed << 32) + i, 24, i % 7 != 6, rule=Whim(i, B) if i % 2 else None, **options)
        life.live(num_steps)
        figures["refused"] += life.num_refused
        figures["swapped_blocks"] += life.model.num_swapped
        advance(num_steps)
    return figures


BATTERIES = [
    Battery("random trees", "operations", 450_000, 180_000_000, run_trees),
    Battery("random managers", "operations", 50_000, 20_000_000, run_managers),
]

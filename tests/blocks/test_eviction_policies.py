"""Policies of eviction beside their rules in plain Python: which run of blocks loses its last one."""

import math
import random

import pytest

from kvpage import BlockConfig, BlockPool, PrefixTree, TreeEntry
from kvpage.blocks.config import EVICTIONS

ALL = 10_000
Key = tuple[int, ...]


class RankedLife:
    """Random requests on a tree, at random times. next_use: of each cached block, as far as one is told."""

    def __init__(self, seed: int, eviction: str) -> None:
        self.rng = random.Random(seed)
        self.pool = BlockPool(24)
        self.tree = PrefixTree(self.pool, 1, eviction=eviction)
        self.eviction, self.now = eviction, 0.0
        self.next_use: dict[Key, float] = {}
        self.pinned: dict[Key, bool] = {}
        self.added: dict[Key, int] = {}  # when a block's run was first free to go
        self.matches: list = []
        self.num_evicted = 0

    def runs(self) -> list[tuple[Key, int, TreeEntry]]:
        """All entries: the path to the end, how many entries go on from it, and the entry."""
        entries = self.tree.entries(ALL)
        paths: list[Key] = []
        for entry in entries:
            before = () if entry.parent is None else paths[entry.parent]
            paths.append((*before, *entry.tokens.tolist()))
        parents = [entry.parent for entry in entries]
        return [(path, parents.count(i), entry) for i, (path, entry) in enumerate(zip(paths, entries, strict=True))]

    def blocks_of(self, path: Key, entry: TreeEntry) -> list[Key]:
        return [path[:end] for end in range(entry.start + 1, len(path) + 1)]

    def note_pins(self) -> None:
        """A use ends what was told of a run, unless several go on from it; a time that is over ends with the use."""
        pinned = {}
        for path, num_after, entry in self.runs():
            for key in self.blocks_of(path, entry):
                pinned[key] = entry.num_pins > 0
                was_pinned = self.pinned.get(key, True)
                is_reused = pinned[key] and not was_pinned and num_after <= 1
                is_over = not pinned[key] and was_pinned and self.next_use.get(key, 0) <= self.now
                if is_reused or is_over:
                    self.next_use.pop(key, None)
            keys = self.blocks_of(path, entry)
            if not all(key in self.added for key in keys):  # the run is new, or has grown: its last blocks go first
                for key in keys:
                    self.added.pop(key, None)
                    if entry.last_used is not None:
                        self.added[key] = entry.last_used
        self.pinned = pinned
        self.tree.check()

    def prompt(self) -> list[int]:
        return [self.rng.randrange(2) for _ in range(self.rng.randrange(9))]

    def request(self) -> None:
        tokens = self.prompt()
        match = self.tree.match(tokens, priority=self.rng.choice([0, 0, 0, 1]))
        self.note_pins()
        num_new = min(len(tokens) - match.num_blocks, self.pool.num_free + self.tree.num_evictable)
        while self.pool.num_free < num_new:
            self.evict()
        match = self.tree.insert(tokens[match.num_blocks :][:num_new], self.pool.allocate(num_new), after=match)
        self.note_pins()
        self.matches.append(match)
        while len(self.matches) > self.rng.randrange(4):
            self.tree.release(self.matches.pop(self.rng.randrange(len(self.matches))))
            self.note_pins()

    def tell(self) -> None:
        tokens, seconds = tuple(self.prompt()), self.rng.choice([0.0, self.rng.random() * 30])
        num_told = self.tree.set_next_use(list(tokens), seconds=seconds)
        due = self.now + seconds
        told = [run for run in self.runs() if run[0] == tokens[: len(run[0])]]
        assert num_told == max((len(path) for path, _, _ in told), default=0)
        for path, _, entry in told:
            for key in self.blocks_of(path, entry):
                if self.next_use.get(key, 0) <= self.now or due < self.next_use[key]:
                    self.next_use[key] = due
                if entry.num_pins == 0 and self.next_use[key] <= self.now:
                    del self.next_use[key]

    def put_first(self) -> None:
        tokens = self.prompt()
        self.tree.put_first(tokens)
        for path, _, entry in self.runs():
            if entry.priority < 0 and path == tuple(tokens)[: len(path)]:
                for key in self.blocks_of(path, entry):
                    if self.next_use.get(key, 0) <= self.now:
                        self.next_use.pop(key, None)

    def worth(self, path: Key, entry: TreeEntry, num_hits: dict[Key, int], is_over: bool) -> float:
        assert entry.last_used is not None
        if self.eviction == "slru":
            is_kept = (num_hits[path] > 0) != is_over
            return (1e30 if is_kept else 1.0) / (1 + round(self.now * 1e9) - entry.last_used)
        if self.eviction == "lfu":
            return 1e12 * num_hits[path] + entry.last_used
        if self.eviction == "fifo":
            return self.added[path]
        depth = min(7, (entry.start.bit_length() + 1) // 2)
        cost = 1 + (4 ** (depth - 1) / 131_072 if depth else 0)
        if path in self.next_use:
            return cost / max(abs(self.next_use[path] - self.now) * 1e3, 1.0)
        age = max(2 * math.log2(max((self.now * 1e9 - entry.last_used) / 1e6, 1.0)), 0.0)
        low, part = int(age), age - int(age)
        return cost * ((1 - part) / (4 * 2 ** (low / 2)) + part / (4 * 2 ** ((low + 1) / 2)))

    def evict(self) -> None:
        runs, hits = self.runs(), self.tree.hottest(ALL, ALL)
        num_hits: dict[Key, int] = {}
        paths: list[Key] = []
        for prefix in hits:
            paths.append((*(() if prefix.parent is None else paths[prefix.parent]), *prefix.first_tokens.tolist()))
            num_hits[paths[-1]] = prefix.num_hits
        unpinned = [(path, entry) for path, _, entry in runs if entry.num_pins == 0]
        num_found = sum(len(entry.tokens) for path, entry in unpinned if num_hits[path])
        is_over = 5 * num_found > 4 * sum(len(entry.tokens) for _, entry in unpinned)
        may_go = [(path, entry) for path, num_after, entry in runs if entry.num_pins == 0 and num_after == 0]
        worths = {path: (entry.priority, self.worth(path, entry, num_hits, is_over)) for path, entry in may_go}
        assert self.tree.evict(1) == bool(may_go)
        gone = {path for path, _, _ in runs} - {path for path, _, _ in self.runs()}
        assert len(gone) == bool(may_go)
        for path in gone:
            least = min(worths.values())
            assert worths[path][0] == least[0] and math.isclose(worths[path][1], least[1], rel_tol=1e-6)
            due = self.next_use.pop(path, 0.0)
            parents = [(p, e) for p, _, e in runs if path[: len(p)] == p and len(p) < len(path)]
            is_whole = [entry for p, entry in may_go if p == path][0].start == len(path) - 1
            if is_whole and parents and self.next_use.get(parents[-1][0], 0.0) <= self.now:
                for key in self.blocks_of(*parents[-1]):
                    if due > self.next_use.get(key, 0.0):
                        self.next_use[key] = due
            self.pinned.pop(path)
            self.added.pop(path)
            self.num_evicted += 1
        self.tree.check()


@pytest.mark.parametrize("eviction", ["slru", "lfu", "fifo", "cost"])
def test_the_run_of_least_worth_loses_a_block(eviction):
    num_evicted = 0
    for seed in range(6):
        life = RankedLife(seed, eviction)
        for _ in range(60):
            life.now += life.rng.random() * 5
            life.tree.set_time(life.now)
            life.rng.choices([life.request, life.tell, life.put_first, life.evict], [6, 2, 1, 2])[0]()
        num_evicted += life.num_evicted
    assert num_evicted > 100


def cache(tree: PrefixTree, pool: BlockPool, tokens: list[int]) -> None:
    match = tree.match(tokens, num_left_over=0)
    ids = pool.allocate(len(tokens) - match.num_blocks)
    tree.release(tree.insert(tokens[match.num_blocks :], ids, after=match))


def num_cached(tree: PrefixTree, tokens: list[int]) -> int:
    return tree.look(tokens)[0].shape[1]


def test_cost_learns_what_is_found_again():
    """Short prompts come again after 3 seconds, long ones never: an older short one outlives a newer long one."""
    pool = BlockPool(100)
    tree = PrefixTree(pool, 1, eviction="cost")
    for now in range(600):
        tree.set_time(float(now))
        tree.evict(max(0, 30 - pool.num_free))
        cache(tree, pool, [now % 3, 1])
        cache(tree, pool, [1000 + now, *range(20)])
    tree.evict(tree.num_evictable - 6)
    assert [num_cached(tree, [short, 1]) for short in range(3)] == [2] * 3


def test_fifo_takes_a_block_that_came_later_for_newer_though_its_run_is_old():
    pool = BlockPool(10)
    tree = PrefixTree(pool, 1, eviction="fifo")
    for tokens in ([1], [2], [1, 3]):
        cache(tree, pool, tokens)
    assert tree.evict(1) == 1 and num_cached(tree, [2]) == 0 and num_cached(tree, [1, 3]) == 2


def test_slru_gives_up_the_found_ones_once_they_are_nearly_all():
    pool = BlockPool(10)
    tree = PrefixTree(pool, 1, eviction="slru")
    for prompt in range(10):
        cache(tree, pool, [prompt])
        if prompt < 8:
            cache(tree, pool, [prompt])
    assert tree.evict(1) == 1 and num_cached(tree, [8]) == 0
    assert tree.evict(1) == 1 and num_cached(tree, [0]) == 0, "8 of 9 are more than four fifths"


def test_a_policy_of_another_name_is_refused():
    with pytest.raises(ValueError, match=f"eviction must be one of {', '.join(EVICTIONS)}, got 'belady'"):
        PrefixTree(BlockPool(1), 1, eviction="belady")
    with pytest.raises(ValueError, match=f"eviction must be one of {', '.join(EVICTIONS)}, got None"):
        BlockConfig(1, 1, eviction=None)
    tree = PrefixTree(BlockPool(1), 1, eviction="cost")
    for seconds in (-1.0, 1e9, float("nan")):
        with pytest.raises(ValueError, match="seconds must be between 0 and"):
            tree.set_next_use([1], seconds=seconds)
        with pytest.raises(ValueError, match="seconds must be between 0 and"):
            tree.set_time(seconds)


EACH = pytest.mark.parametrize("eviction", EVICTIONS)


@EACH
def test_a_namespace_goes_whose_stem_is_worth_less_than_its_branches(eviction):
    pool = BlockPool(256)
    tree = PrefixTree(pool, 1, eviction=eviction)
    stem = list(range(100))
    tree.release(tree.insert(stem, pool.allocate(100), b"n"))
    for _ in range(3):
        tree.release(tree.match([*stem, 999], b"n"))
    for end in ([200, 201], [300, 301]):
        tree.release(tree.insert(end, pool.allocate(2), after=tree.match([*stem, *end], b"n")))
    tree.set_next_use([*stem, 200, 201], b"n", seconds=0.5)
    assert tree.drop_namespace(b"n") == 104 and tree.num_nodes == 0
    tree.check()
    tree.release(tree.insert(stem, pool.allocate(100)))
    assert tree.evict(256) == 100
    tree.check()


@EACH
def test_a_pinned_path_that_was_sent_out_leaves_its_stem_evictable(eviction):
    pool, host = BlockPool(8), BlockPool(8)
    tree = PrefixTree(pool, 1, host, eviction=eviction)
    stem = tree.insert([1, 2, 3], pool.allocate(3))
    end = tree.insert([4, 5], pool.allocate(2), after=tree.pin(stem))
    tree.send_out(end)
    tree.release(end)
    tree.release(stem)
    tree.check()
    assert tree.num_evictable == 3 == tree.evict(3)
    tree.check()


@EACH
def test_a_cut_in_a_run_leaves_the_run_before_it_evictable_on_the_host(eviction):
    pool, host = BlockPool(16), BlockPool(2)
    tree = PrefixTree(pool, 1, host, eviction=eviction)
    stem = tree.insert([1], pool.allocate(1))
    end = tree.insert([2, 3], pool.allocate(2), after=tree.pin(stem))
    tree.write_out(stem, 0)
    tree.release(end)
    tree.release(stem)
    tree.demote(1)
    tree.put_first([1, 2, 3], b"", 2)
    tree.check()
    assert tree.num_host_evictable == 2 == tree.evict_host(2)


def test_uses_of_one_moment_go_by_their_order():
    pool = BlockPool(8)
    tree = PrefixTree(pool, 1, eviction="slru")
    tree.set_time(1.0)
    for token in range(5):
        tree.release(tree.insert([token], pool.allocate(1)))
    tree.evict(1)
    assert sorted(int(entry.tokens[0]) for entry in tree.entries(ALL)) == [1, 2, 3, 4]

"""What a tree remembers of evictions, against an oracle that remembers everything that was ever cached."""

import random

import pytest

from kvpage import BlockManager, BlockPool, PrefixTree
from kvpage.blocks.explain import Ending

B = 3
NAMESPACES = [b"", b"tenant", b"a tenant with a long name"]
Key = tuple[bytes, tuple[int, ...]]  # a namespace and all tokens up to the end of a block


def cached_keys(tree: PrefixTree) -> set[Key]:
    keys, entries = set(), tree.entries(10_000)
    paths: list[tuple[int, ...]] = []
    for entry in entries:
        before = () if entry.parent is None else paths[entry.parent]
        paths.append((*before, *entry.tokens.tolist()))
        keys |= {(entry.namespace, paths[-1][:end]) for end in range(len(before) + B, len(paths[-1]) + 1, B)}
    return keys


class Life:
    """Random inserts, matches that split edges, evictions from both tiers, and blocks that come back."""

    def __init__(self, seed: int, num_host_blocks: int) -> None:
        self.rng = random.Random(seed)
        self.pool, host = BlockPool(24), BlockPool(num_host_blocks)
        self.tree = PrefixTree(self.pool, B, host if num_host_blocks else None)
        self.evicted: set[Key] = set()  # ever
        self.counts = {"told": 0, "gone": 0, "moved": 0}

    def tokens(self) -> list[int]:
        return [int(self.rng.random() < 0.2) for _ in range(self.rng.randrange(6 * B + 1))]

    def insert(self) -> None:
        tokens, name = self.tokens(), self.rng.choice(NAMESPACES)
        match = self.tree.match(tokens, name, num_left_over=0)
        self.tree.trim(match)
        rest = tokens[match.num_tokens : len(tokens) // B * B]
        self.make_room(len(rest) // B)
        ids = self.pool.allocate(min(len(rest) // B, self.pool.num_free))
        self.tree.release(self.tree.insert(rest[: len(ids) * B], ids, after=match))

    def match(self) -> None:
        self.tree.release(self.tree.match(self.tokens(), self.rng.choice(NAMESPACES)))

    def make_room(self, num_blocks: int) -> None:
        lacking = max(num_blocks - self.pool.num_free, 0)
        self.leave(lambda: self.tree.demote(lacking) if self.rng.random() < 0.7 else self.tree.evict(lacking))

    def leave(self, call) -> None:
        """Evict. A prompt that goes through a block which is gone now is told so at once."""
        before = cached_keys(self.tree)
        call()
        after = cached_keys(self.tree)
        gone = before - after
        self.evicted |= gone
        self.counts["moved"] += self.tree.num_host_cached
        for name, path in gone:
            assert self.tree.look(path, name)[3], (name, path)
        self.counts["gone"] += len(gone)

    def look(self) -> None:
        tokens, name = self.tokens(), self.rng.choice(NAMESPACES)
        ids, _, _, was_evicted = self.tree.look(tokens, name)
        self.counts["told"] += was_evicted
        assert not was_evicted or (name, tuple(tokens[: (ids.shape[1] + 1) * B])) in self.evicted

    def step(self) -> None:
        self.rng.choice([self.insert, self.insert, self.match, self.look, self.look, self.look])()
        if self.rng.random() < 0.1:
            self.leave(lambda: self.tree.evict_host(self.rng.randrange(4)))
        self.tree.check(owned_ids=[])


@pytest.mark.parametrize("seed, num_host_blocks", [(1, 0), (2, 0), (3, 6), (4, 40)])
def test_what_is_told_was_evicted_and_what_was_just_evicted_is_told(seed, num_host_blocks):
    life = Life(seed, num_host_blocks)
    for _ in range(400):
        life.step()
    assert life.counts["told"] > 20 and life.counts["gone"] > 20
    assert (life.counts["moved"] > 0) == (num_host_blocks > 0)
    life.tree.clear()
    assert not any(life.tree.look(path, name)[3] for name, path in life.evicted)


def filled(tokens: list[int], num_blocks: int = 8, num_host_blocks: int = 0) -> tuple[BlockPool, PrefixTree]:
    pool = BlockPool(num_blocks)
    tree = PrefixTree(pool, B, BlockPool(num_host_blocks) if num_host_blocks else None)
    tree.release(tree.insert(tokens, pool.allocate(len(tokens) // B)))
    return pool, tree


TOKENS = list(range(1, 4 * B + 1))


@pytest.mark.parametrize("num_evicted", range(1, 5))
def test_a_prompt_that_lacks_a_whole_block_is_told_apart(num_evicted):
    pool, tree = filled(TOKENS)
    tree.evict(num_evicted)
    start = (4 - num_evicted) * B
    assert tree.look(TOKENS)[3] and tree.look(TOKENS[: start + B])[3]
    assert not tree.look(TOKENS[: start + B - 1])[3]  # a part of a block may be another's
    assert not tree.look([*TOKENS[:start], *[9] * B])[3]
    assert not tree.look(TOKENS, b"tenant")[3]


def test_an_edge_that_is_split_or_grows_is_another():
    pool, tree = filled(TOKENS)
    tree.evict(1)
    tree.release(tree.match(TOKENS[: 2 * B]))  # splits: the end stays
    assert tree.look(TOKENS)[3]
    tree.release(tree.insert([*TOKENS[: 3 * B], *[9] * B], pool.allocate(4)))
    assert tree.look(TOKENS)[1:] == (3 * B, 9, False)  # inside of an edge nothing is known
    assert not tree.look([*TOKENS[: 3 * B], *[9] * B, *TOKENS[3 * B :]])[3]
    tree.check(owned_ids=[])


def test_a_prompt_that_was_computed_again_is_cached():
    pool, tree = filled(TOKENS)
    tree.evict(4)
    tree.release(tree.insert(TOKENS, pool.allocate(4)))
    assert tree.look(TOKENS)[1:] == (4 * B, None, False)


def test_what_is_on_the_host_or_was_dropped_is_not_evicted():
    pool, tree = filled(TOKENS, num_host_blocks=4)
    tree.demote(4)
    assert tree.look(TOKENS)[1:] == (4 * B, None, False)
    tree.evict_host(2)
    assert tree.look(TOKENS)[1:] == (2 * B, None, True)
    pool, tree = filled(TOKENS)
    tree.drop(TOKENS)
    assert not tree.look(TOKENS)[3]


def test_the_oldest_of_too_many_is_forgotten():
    pool, tree = filled([1] * B)
    tree.release(tree.insert([9] * B, pool.allocate(1), b"other"))
    for first in range(2, 4098):
        tree.evict(1)
        assert tree.look([1] * B)[3]
        tree.release(tree.insert([first] * B, pool.allocate(1), b"other"))
    tree.evict(1)
    assert not tree.look([1] * B)[3]


@pytest.mark.parametrize("share_parts", [True, False])
def test_explain_tells_evictions_and_a_reset_forgets_them(share_parts):
    manager = BlockManager(4, B, share_parts=share_parts)
    for seq_id, tokens in enumerate((TOKENS, [*TOKENS[:B], *range(50, 50 + 2 * B)])):
        manager.allocate(seq_id, tokens)
        manager.do_moves(lambda move: None)
        manager.commit(seq_id, tokens[manager.state(seq_id).num_written :])
        manager.release(seq_id)
    (group,) = manager.explain(TOKENS).groups
    assert (group.num_tokens, group.ending) == (2 * B, Ending.KV_EVICTED) and "cached, and evicted" in str(group)
    assert manager.explain([*TOKENS[:B], *[7] * (B + 1)]).groups[0].ending is Ending.DIFFERENT
    assert manager.explain(TOKENS[:B]).groups[0].ending is Ending.PROMPT
    manager.reset_prefix_cache()
    assert manager.explain(TOKENS).groups[0].ending is Ending.NOT_CACHED

"""TreeLife: BlockPool and PrefixTree, with one tier or two, beside NaivePool and NaiveTree.

A tiny alphabet and few blocks make prefixes meet, edges split, blocks run out, and duplicates come up all the time.
Every pair that the tree returns is carried out at once in a memory that says whose K and V each block has: so a match
that names a block with another key's content, or one that was overwritten, is found by its content.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from support.life import Life, Operation
from support.naive_pool import Key, NaivePool
from support.naive_tree import Host, NaiveMatch, NaiveTree

from kvpage import BlockPool, HotPrefix, Match, OutOfBlocks, PrefixTree, TreeEntry

NAMESPACES = [b"", b"", b"lora", b"a tenant with a long name"]
MOST_MATCHES = 6
ALL = 10_000  # entries
Pair = tuple[Match, NaiveMatch]


@dataclass(frozen=True, slots=True)
class TreeWorld:
    """num_host_blocks: None without a host tier. hash_bits: of the children's hashes; few make them collide."""

    num_blocks: int
    num_host_blocks: int | None
    block_size: int
    hash_bits: int = 64

    def life(self, seed: int) -> "TreeLife":
        return TreeLife(seed, self)


WORLDS = [
    TreeWorld(24, None, 1),
    TreeWorld(64, None, 2),
    TreeWorld(40, None, 2, 0),
    TreeWorld(40, None, 3, 1),
    TreeWorld(12, None, 2, 2),
    TreeWorld(30, None, 4),
    TreeWorld(16, 16, 1),
    TreeWorld(16, 40, 2),
    TreeWorld(24, 6, 2, 0),
    TreeWorld(10, 3, 2, 2),
    TreeWorld(12, 0, 2),
    TreeWorld(8, 64, 3),
    TreeWorld(20, 20, 4, 1),
]


class TreeLife(Life):
    """owned: an id for each reference that is not the tree's. evicted: what was ever evicted since the last clear."""

    def __init__(self, seed: int, world: TreeWorld) -> None:
        super().__init__(seed)
        self.world, self.block_size = world, world.block_size
        self.pool = BlockPool(world.num_blocks)
        self.host_pool = None if world.num_host_blocks is None else BlockPool(world.num_host_blocks)
        hash_mask = 2**world.hash_bits - 1
        self.tree = PrefixTree(self.pool, world.block_size, self.host_pool, _hash_mask=hash_mask)
        self.naive_pool = NaivePool(world.num_blocks)
        self.naive = NaiveTree(self.naive_pool, world.block_size, world.num_host_blocks or 0)
        self.owned: list[int] = []
        self.matches: list[Pair] = []
        self.released: list[Pair] = []
        self.device_memory: dict[int, object] = {}
        self.host_memory: dict[int, object] = {}
        self.host_ids: dict[int, int] = {}  # by Host.number
        self.evicted: set[Key] = set()
        self.most_companions = 0  # that there have been at once, dead ones included

    def operations(self) -> dict[Operation, float]:
        return {
            self.allocate: 4, self.share: 1, self.release_ids: 3, self.match: 5, self.match_part: 2, self.pin: 1,
            self.release: 4, self.trim: 1, self.shorten: 1, self.promote: 3, self.write_out: 1, self.insert: 9,
            self.evict: 1, self.demote: 5, self.evict_host: 1, self.drop: 1, self.drop_namespace: 0.3,
            self.put_first: 2, self.clear: 0.2, self.look: 2, self.send_out: 2, self.entries: 1, self.hottest: 1,
            self.pinned_alone: 1, self.give_companions: 2, self.free_companions: 1,
        }  # fmt: skip

    # --- what operations are made of ---

    def tokens(self, num_tokens: int) -> list[int]:
        if self.block_size == 1:
            return [self.rng.randrange(3) for _ in range(num_tokens)]
        return [int(self.rng.random() < 0.2) for _ in range(num_tokens)]

    def prompt(self) -> tuple[list[int], bytes]:
        """Often what is cached somewhere, with other tokens after it."""
        tokens, name = self.tokens(self.rng.randrange(8 * self.block_size)), self.rng.choice(NAMESPACES)
        if self.naive.blocks and self.rng.random() < 0.4:
            name, path = self.rng.choice(list(self.naive.blocks))
            tokens = [*path, *tokens[: self.rng.randrange(2 * self.block_size + 1)]]
        return tokens, name

    def as_some_kind(self, integers: list[int]) -> Any:
        kind = self.rng.randrange(3)
        return integers if kind == 0 else np.array(integers, np.int32 if kind == 1 else np.int64)

    def some_ids(self, count: int) -> list[int]:
        """Mostly owned and distinct, sometimes anything."""
        if self.rng.random() < 0.05:
            return [self.rng.randrange(-1, self.pool.num_blocks + 1) for _ in range(count)]
        distinct = list(dict.fromkeys(self.owned))
        return self.rng.sample(distinct, min(count, len(distinct)))

    def some_match(self) -> Pair | None:
        """Mostly a live one; now and then one that is released."""
        source = self.released if self.released and self.rng.random() < 0.05 else self.matches
        return self.rng.choice(source) if source else None

    def both(self, real: Callable[[], Any], naive: Callable[[], Any]) -> tuple[Any, Any] | None:
        """Return the two results, or None if both refuse in the same way."""
        try:
            expected = naive()
        except (ValueError, OutOfBlocks) as refusal:
            with pytest.raises(type(refusal)) as raised:
                real()
            assert not isinstance(refusal, OutOfBlocks) or raised.value.args == refusal.args
            self.figures[type(refusal).__name__] += 1
            return None
        return real(), expected

    def keep(self, pair: Pair | None) -> None:
        if pair is None:
            return
        self.compare_path(*pair)
        self.matches.append(pair)
        while len(self.matches) > MOST_MATCHES:
            self.release_match(self.rng.choice(self.matches))

    def retire(self, pair: Pair) -> None:
        assert pair[0].is_released
        self.matches.remove(pair)
        self.released = [*self.released[-3:], pair]

    def own(self, ids: list[int]) -> None:
        self.owned += ids
        self.device_memory |= {i: ("owned", i) for i in ids}

    def disown(self, ids: list[int]) -> None:
        for i in ids:
            if i in self.owned:  # the others were the tree's already
                self.owned.remove(i)

    # --- the pool ---

    def allocate(self) -> None:
        self.take(self.rng.randrange(7))

    def take(self, count: int) -> list[int]:
        results = self.both(lambda: self.pool.allocate(count).tolist(), lambda: self.naive_pool.allocate(count))
        if results is None:
            return []
        assert results[0] == results[1]
        self.own(results[0])
        return results[1]

    def share(self) -> None:
        ids = self.some_ids(self.rng.randrange(3))
        if self.both(lambda: self.pool.share(ids), lambda: self.naive_pool.share(ids)):
            self.owned += ids

    def release_ids(self) -> None:
        ids = self.some_ids(self.rng.randrange(5))
        if ids and self.rng.random() < 0.3:
            ids.append(self.rng.choice(ids))
        if self.both(lambda: self.pool.release(self.as_some_kind(ids)), lambda: self.naive_pool.release(ids)):
            self.disown(ids)

    # --- matches ---

    def match(self) -> None:
        tokens, name = self.prompt()
        kind, priority = self.as_some_kind(tokens), self.rng.choice([0, 0, 0, 1, 7])
        num_held, num_evictable = self.tree.num_held(kind, name), self.tree.num_evictable
        pair = self.both(
            lambda: self.tree.match(kind, name, priority), lambda: self.naive.match(tokens, name, priority)
        )
        assert 0 <= num_evictable - self.tree.num_evictable <= num_held <= num_evictable
        self.keep(pair)

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
        key = (self.device_memory if part.is_on_device else self.host_memory)[part.block_id]
        assert key in self.naive.blocks and key[0] == naive.namespace
        assert key[1][: len(naive.tokens) + most] == tuple(tokens)[: len(naive.tokens) + most]
        self.tree.check()
        self.naive.release(self.naive.pinned(naive.namespace, self.edge_after(key, part.match.num_blocks), 0))
        self.tree.release(part.match)
        self.figures["parts"] += 1

    def edge_after(self, key: Key, num_blocks: int) -> list[Key]:
        """The keys up to the end of the key's edge: the tree pins all of it, and so uses all of it."""
        (name, path), length = key, num_blocks * self.block_size
        (end,) = (k[1] for k in self.naive.blocks if k[0] == name and len(k[1]) == length and k[1][: len(path)] == path)
        return self.naive.keys(name, (), end)  # one end: an edge does not fork

    def pin(self) -> None:
        if pair := self.some_match():
            self.keep(self.both(lambda: self.tree.pin(pair[0]), lambda: self.naive.pin(pair[1])))

    def release(self) -> None:
        if pair := self.some_match():
            self.release_match(pair)

    def release_match(self, pair: Pair) -> None:
        if self.both(lambda: self.tree.release(pair[0]), lambda: self.naive.release(pair[1])):
            self.retire(pair)

    def trim(self) -> None:
        if pair := self.some_match():
            self.both(lambda: self.tree.trim(pair[0]), lambda: self.naive.trim(pair[1]))

    def shorten(self) -> None:
        if pair := self.some_match():
            count = self.rng.randrange(len(pair[1].keys) + 2)
            self.both(lambda: self.tree.shorten(pair[0], count), lambda: self.naive.shorten(pair[1], count))

    def pinned_alone(self) -> None:
        some = self.rng.sample(self.matches, self.rng.randint(0, len(self.matches)))
        found = self.tree.num_pinned_only_by([match for match, _ in some])
        assert found == self.naive.num_pinned_only_by([naive for _, naive in some])

    # --- copies ---

    def to_host(self, real: np.ndarray, naive: list[tuple[int, Host]], figure: str = "demoted") -> None:
        assert real[:, 0].tolist() == [device for device, _ in naive]
        for (device, host_id), (_, host) in zip(real.tolist(), naive, strict=True):
            self.host_memory[host_id] = self.device_memory[device]
            self.host_ids[host.number] = host_id
        self.figures[figure] += len(naive)

    def to_device(self, real: np.ndarray, naive: list[tuple[Host, int]]) -> None:
        assert real.tolist() == [[self.host_ids[host.number], device] for host, device in naive]
        self.device_memory |= {device: self.host_memory[host_id] for host_id, device in real.tolist()}
        self.figures["promoted"] += len(naive)

    def promote(self) -> None:
        pairs = [pair for pair in self.matches if self.num_host_only(pair[1])]
        pair = self.rng.choice(pairs) if pairs else self.some_match()
        if pair is None:
            return
        num_missing = self.num_host_only(pair[1]) if pair[1].live else 0
        ids = self.some_ids(self.rng.randrange(4))
        if self.rng.random() < 0.8:
            ids = ids[:num_missing] or self.take(min(num_missing, self.pool.num_free))
        results = self.both(lambda: self.tree.promote(pair[0], ids), lambda: self.naive.promote(pair[1], ids))
        if results is not None:
            self.disown(ids)
            self.to_device(*results)

    def num_host_only(self, naive: NaiveMatch) -> int:
        return len(naive.keys) - self.naive.on_device(naive.keys)

    def write_out(self) -> None:
        if pair := self.some_match():
            with self.watched():
                results = self.both(lambda: self.tree.write_out(pair[0]), lambda: self.naive.write_out(pair[1]))
                if results is not None:
                    self.to_host(*results, "written")

    def send_out(self) -> None:
        if pair := self.some_match():
            num_before = self.naive.on_device(list(self.naive.blocks))
            with self.watched():
                results = self.both(lambda: self.tree.send_out(pair[0]), lambda: self.naive.send_out(pair[1]))
                if results is not None:
                    self.to_host(*results)
            self.figures["evicted"] += num_before - self.naive.on_device(list(self.naive.blocks))

    # --- companions ---

    def give_companions(self) -> None:
        """Blocks that have none get such as no other block has, nor had before its owners know of its end."""
        if (pair := self.some_match()) is None:
            return
        match, naive = pair
        start, end = sorted(self.rng.randrange(len(naive.keys) + 1) for _ in range(2))
        if not naive.live or self.rng.random() < 0.05:
            with pytest.raises(ValueError, match="must be pinned|must be in order"):
                self.tree.give_companions(match, end + 1, start)
            return
        self.tree.give_companions(match, start, end)
        taken = {block.companion for block in self.naive.blocks.values()} | self.naive.dead
        for key, companion in zip(naive.keys[start:end], match.tier_block_ids(start)[2].tolist(), strict=False):
            block = self.naive.blocks[key]
            if block.companion < 0:
                assert companion >= 0 and companion not in taken
                block.companion = companion
                taken.add(companion)
        num_given = sum(block.companion >= 0 for block in self.naive.blocks.values()) + len(self.naive.dead)
        self.most_companions = max(self.most_companions, num_given)
        assert max(taken - {-1}, default=-1) < self.most_companions, "no more of them than there have to be"
        self.figures["companions"] += end - start

    def free_companions(self) -> None:
        dead = self.tree.dead_companions()
        assert sorted(dead) == sorted(self.naive.dead)
        with pytest.raises(ValueError, match="num_dead must be between 0 and"):
            self.tree.free_companions(self.rng.choice([-1, len(dead) + 1]))
        count = self.rng.randrange(len(dead) + 1)
        self.tree.free_companions(count)
        self.naive.dead -= set(dead[:count])
        self.figures["dead companions"] += count

    # --- insertion ---

    def insert(self) -> None:
        found = self.some_match() if self.rng.random() < 0.6 else None
        after, naive_after = found or (None, None)
        num_blocks, is_odd = self.rng.randrange(4), self.rng.random() < 0.03
        tokens = self.tokens(num_blocks * self.block_size + is_odd)
        name = b"" if found and self.rng.random() < 0.97 else self.rng.choice(NAMESPACES)
        priority = 0 if found and self.rng.random() < 0.97 else self.rng.choice([0, 0, 2])
        whose = (naive_after.namespace, naive_after.tokens) if naive_after else (name, ())
        keys = self.naive.keys(*whose, tokens)
        ids, kind = self.ids_to_insert(keys, num_blocks), self.as_some_kind(tokens)
        fresh = {i: key for i, key in zip(ids, keys, strict=False) if self.device_of(key) is None}
        num_known = sum(key in self.naive.blocks for key in fresh.values())
        results = self.both(
            lambda: self.tree.insert(kind, ids, name, after, priority),
            lambda: self.naive.insert(tokens, ids, name, naive_after, priority),
        )
        if results is None:
            return
        self.figures["filled"] += num_known
        self.device_memory |= fresh
        self.disown(ids)
        if found:
            self.retire(found)
        self.keep(results)

    def device_of(self, key: Key) -> int | None:
        return self.naive.blocks[key].device if key in self.naive.blocks else None

    def ids_to_insert(self, keys: list[Key], num_blocks: int) -> list[int]:
        """The caller's, some of them shared by others; now and then the tree's own, where it has some."""
        ids = self.some_ids(num_blocks)
        if self.rng.random() < 0.7:
            ids = [i for i in ids if self.owned.count(i) == 1]
        if len(ids) < num_blocks and self.naive_pool.free:
            ids += self.take(min(num_blocks - len(ids), self.pool.num_free))
        if self.rng.random() < 0.3:
            own = [self.device_of(key) for key in keys]
            ids = [i if at >= len(own) or own[at] is None else own[at] for at, i in enumerate(ids)]
        return ids

    # --- eviction ---

    def watched(self) -> "Watched":
        """A context in which blocks may be evicted: a prompt that goes through one of them is told so at once."""
        return Watched(self)

    def evict(self) -> None:
        count = self.rng.randrange(5)
        with self.watched():
            num_freed, _ = self.naive.leave(count, False)
            assert self.tree.evict(count) == num_freed
            self.figures["evicted"] += num_freed

    def demote(self) -> None:
        count = self.rng.randrange(6)
        with self.watched():
            num_freed, pairs = self.tree.demote(count)
            expected, naive_pairs = self.naive.leave(count, True)
            assert num_freed == expected
            self.to_host(pairs, naive_pairs)
            self.figures["evicted"] += num_freed

    def evict_host(self) -> None:
        count = self.rng.randrange(3)
        with self.watched():
            assert self.tree.evict_host(count) == self.naive.evict_host(count)

    def drop(self) -> None:
        tokens, name = self.prompt()
        assert self.tree.drop(self.as_some_kind(tokens), name) == self.naive.drop(tokens, name)

    def put_first(self) -> None:
        tokens, name = self.prompt()
        num_kept, kind = self.rng.choice([0, self.rng.randrange(len(tokens) + 2)]), self.as_some_kind(tokens)
        num_tokens = self.naive.put_first(tokens, name, num_kept)
        assert self.tree.put_first(kind, name, num_kept) == num_tokens
        self.figures["first"] += num_tokens > 0

    def drop_namespace(self) -> None:
        _, name = self.prompt()
        assert self.tree.drop_namespace(name) == self.naive.drop_namespace(name)

    def clear(self) -> None:
        assert self.tree.clear() == self.naive.clear()
        assert not any(self.tree.look(path, name)[3] for name, path in self.evicted)
        self.evicted.clear()

    # --- looks ---

    def look(self) -> None:
        tokens, name = self.prompt()
        ids, num_common, next_token, was_evicted = self.tree.look(self.as_some_kind(tokens), name)
        keys = self.naive.cached(tokens, name)
        assert ids.T.tolist() == [self.ids_of(key) for key in keys]
        most, following = self.naive.common(tokens, name)
        assert num_common == most and next_token in (following or {None})
        is_known = (name, tuple(tokens[: (len(keys) + 1) * self.block_size])) in self.evicted
        assert is_known or not was_evicted or self.world.hash_bits < 64
        self.figures["told"] += was_evicted

    def ids_of(self, key: Key) -> list[int]:
        """The block's ids on the device and on the host, and its companion; -1 where there is none."""
        block = self.naive.blocks[key]
        device = -1 if block.device is None else block.device
        return [device, -1 if block.host is None else self.host_ids[block.host.number], block.companion]

    def entries(self) -> None:
        entries = self.tree.entries(ALL)
        found, order = {}, []
        for entry in sorted(entries, key=lambda entry: (entry.priority, entry.last_used or 0, -entry.start)):
            keys = self.keys_of_run(path_of(entries, entry), entry.start)
            assert (entry.last_used is None) == (entry.num_pins > 0) and not found.keys() & set(keys)
            found |= {key: (*ids, entry.num_pins) for key, ids in zip(keys, tier_ids(entry, len(keys)), strict=True)}
            order += [] if entry.num_pins else reversed(keys)
        assert found == {key: (*self.ids_of(key)[:2], block.pins) for key, block in self.naive.blocks.items()}
        assert order == self.naive.eviction_order()
        assert len(entries) == self.tree.num_nodes
        self.figures["nodes"] = max(self.figures["nodes"], len(entries))

    def keys_of_run(self, path: tuple[bytes, tuple[int, ...]], start: int) -> list[Key]:
        assert len(path[1]) > start and len(path[1]) % self.block_size == start % self.block_size == 0
        return [(path[0], path[1][:end]) for end in range(start + self.block_size, len(path[1]) + 1, self.block_size)]

    def hottest(self) -> None:
        """A block that was appended counts as often as those before it in its run."""
        found = self.tree.hottest(ALL, ALL)
        hits = {}
        for prefix in found:
            keys = self.keys_of_run(path_of(found, prefix), prefix.start)
            hits |= dict.fromkeys(keys, prefix.num_hits)
            blocks = [self.naive.blocks[key] for key in keys]
            assert prefix.num_tokens == len(keys) * self.block_size and prefix.num_pins == blocks[-1].pins
            assert prefix.num_blocks == sum(block.device is not None for block in blocks)
            assert prefix.num_host_blocks == sum(block.host is not None for block in blocks)
        assert hits.keys() == self.naive.blocks.keys() and len(found) == self.tree.num_nodes
        for (name, path), num_hits in hits.items():
            before = hits.get((name, path[: -self.block_size]), num_hits)
            assert self.naive.blocks[name, path].num_hits <= num_hits <= before
        ranks = [prefix.num_hits for prefix in found]
        assert ranks == sorted(ranks, reverse=True)
        self.figures["hits"] = max([self.figures["hits"], *ranks])

    # --- comparing ---

    def compare_path(self, match: Match, naive: NaiveMatch) -> None:
        num_blocks, num_on_device = len(naive.keys), self.naive.on_device(naive.keys)
        assert (match.num_blocks, match.num_tokens) == (num_blocks, len(naive.tokens))
        assert (match.priority, match.num_device_blocks) == (naive.priority, num_on_device)
        start = self.rng.randrange(num_blocks + 1)
        assert match.tier_block_ids(start).T.tolist() == [self.ids_of(key) for key in naive.keys[start:]]
        if num_on_device < num_blocks:
            with pytest.raises(ValueError, match="match must be on the device"):
                _ = match.block_ids
            return
        block_ids = [self.naive.blocks[key].device for key in naive.keys]
        assert match.block_ids.tolist() == block_ids and match.block_ids_from(start).tolist() == block_ids[start:]
        assert [self.device_memory[i] for i in block_ids] == naive.keys

    def compare(self) -> None:
        tree, naive, blocks = self.tree, self.naive, self.naive.blocks
        self.pool.check()
        tree.check(self.owned, [])
        counts = [self.pool.ref_count(i) for i in range(self.pool.num_blocks)]
        assert counts == self.naive_pool.counts and self.pool.num_free == len(self.naive_pool.free)
        assert self.host_pool is None or self.host_pool.num_free == naive.num_free_host
        assert tree.num_matches == len(self.matches)
        assert tree.num_cached == naive.on_device(list(blocks)) and tree.num_evictable == naive.on_device(naive.used)
        assert tree.num_host_cached == sum(block.host is not None for block in blocks.values())
        assert tree.num_host_evictable == sum(blocks[key].host is not None for key in naive.used)
        left = [self.figures[figure] for figure in ("evicted", "demoted", "written", "promoted")]
        assert tree.counts == (*left, left[1] + left[2] - tree.num_host_cached)
        for key, block in blocks.items():
            assert block.device is None or self.device_memory[block.device] == key
            assert block.host is None or self.host_memory[self.host_ids[block.host.number]] == key
        for pair in self.matches:
            self.compare_path(*pair)
        assert sorted(tree.dead_companions()) == sorted(naive.dead)

    def end(self) -> None:
        while self.matches:
            self.release_match(self.matches[0])
        self.clear()
        self.pool.release(self.owned)
        assert self.pool.num_free == self.pool.num_blocks and self.tree.num_nodes == self.tree.num_matches == 0
        assert self.host_pool is None or self.host_pool.num_free == self.host_pool.num_blocks


class Watched:
    def __init__(self, life: TreeLife) -> None:
        self.life = life

    def __enter__(self) -> None:
        self.before = set(self.life.naive.blocks)

    def __exit__(self, kind: object, *error: object) -> None:
        gone = self.before - self.life.naive.blocks.keys()
        self.life.evicted |= gone
        self.life.figures["gone"] += len(gone)
        assert kind or all(self.life.tree.look(path, name)[3] for name, path in gone)


def path_of(found: list[TreeEntry] | list[HotPrefix], run: TreeEntry | HotPrefix) -> tuple[bytes, tuple[int, ...]]:
    """Return the namespace and all tokens up to the run's end."""
    before = () if run.parent is None else path_of(found, found[run.parent])[1]
    assert run.start == len(before)
    tokens = run.tokens if isinstance(run, TreeEntry) else run.first_tokens
    return run.namespace, (*before, *tokens.tolist())


def tier_ids(entry: TreeEntry, num_blocks: int) -> list[tuple[int, int]]:
    """Return the ids of each block on the device and on the host; -1 where it is not."""
    device, host = entry.block_ids.tolist(), entry.host_block_ids.tolist()
    absent = [-1] * num_blocks
    return list(zip((device + absent)[:num_blocks], (host + absent)[:num_blocks], strict=True))

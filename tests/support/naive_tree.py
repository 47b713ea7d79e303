"""NaiveTree: PrefixTree with one tier or two as a record for every block, lists of keys, and nothing clever.

Here are no edges, no hashes, no lists of nodes. Device ids are those of a NaivePool, exactly: so the model says which
block every eviction frees, and in which order. Host ids are the model's own (`Host`): which free host block is taken is
not promised, so a life maps one to the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from support.naive_pool import Key, NaivePool

NUM_PRIORITIES = 8  # of the tree: 0 to 7


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many items two sequences share at their beginning."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@dataclass(eq=False)
class Host:
    """A host block that was given to a key once."""

    number: int = field(default_factory=count().__next__)


@dataclass
class NaiveBlock:
    device: int | None
    host: Host | None = None
    pins: int = 0
    priority: int = 0  # -1: put first
    use: int = 0  # number of the release that came last
    num_hits: int = 0
    companion: int = -1


@dataclass
class NaiveMatch:
    namespace: bytes
    keys: list[Key]
    priority: int
    live: bool = True

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.keys[-1][1] if self.keys else ()


@dataclass
class NaiveTree:
    pool: NaivePool
    block_size: int
    num_host_blocks: int
    blocks: dict[Key, NaiveBlock] = field(default_factory=dict)
    used: list[Key] = field(default_factory=list)  # unpinned ones, least recently used first
    num_free_host: int = 0
    num_uses: int = 0
    dead: set[int] = field(default_factory=set)  # companions of blocks that are gone

    def __post_init__(self) -> None:
        self.num_free_host = self.num_host_blocks

    def keys(self, namespace: bytes, before: tuple[int, ...], tokens: Sequence[int]) -> list[Key]:
        path = (*before, *tokens)
        ends = range(len(before) + self.block_size, len(path) + 1, self.block_size)
        return [(namespace, path[:end]) for end in ends]

    def on_device(self, keys: list[Key]) -> int:
        return sum(self.blocks[key].device is not None for key in keys)

    # --- matches ---

    def cached(self, tokens: Sequence[int], namespace: bytes) -> list[Key]:
        keys = self.keys(namespace, (), tokens)
        return keys[: next((i for i, key in enumerate(keys) if key not in self.blocks), len(keys))]

    def pinned(self, namespace: bytes, keys: list[Key], priority: int) -> NaiveMatch:
        for key in keys:
            block = self.blocks[key]
            block.pins += 1
            block.priority = max(block.priority, priority)
            if key in self.used:
                self.used.remove(key)
        return NaiveMatch(namespace, list(keys), priority)

    def match(self, tokens: Sequence[int], namespace: bytes, priority: int) -> NaiveMatch:
        keys = self.cached(tokens[: max(len(tokens) - 1, 0)], namespace)
        for key in keys:
            self.blocks[key].num_hits += 1
        return self.pinned(namespace, keys, priority)

    def match_part(self, match: NaiveMatch, tokens: Sequence[int]) -> int:
        """Return the number of tokens of the block after the match that some path shares."""
        rest = tuple(tokens)[len(match.tokens) : max(len(tokens) - 1, 0)]
        depth, best = len(match.tokens), 0
        for namespace, path in self.blocks:
            if namespace == match.namespace and len(path) == depth + self.block_size and path[:depth] == match.tokens:
                best = max(best, common_prefix(path[depth:], rest))
        return best

    def pin(self, match: NaiveMatch) -> NaiveMatch:
        self.check_live(match)
        return self.pinned(match.namespace, match.keys, match.priority)

    def check_live(self, match: NaiveMatch) -> None:
        if not match.live:
            raise ValueError("released")

    def unpin(self, keys: list[Key]) -> None:
        self.num_uses += 1
        for key in reversed(keys):
            self.blocks[key].pins -= 1
            if self.blocks[key].pins == 0:
                self.blocks[key].use = self.num_uses
                self.used.append(key)

    def release(self, match: NaiveMatch) -> None:
        self.check_live(match)
        match.live = False
        self.unpin(match.keys)

    def trim(self, match: NaiveMatch) -> None:
        self.check_live(match)
        self.shorten(match, self.on_device(match.keys))

    def shorten(self, match: NaiveMatch, num_blocks: int) -> None:
        self.check_live(match)
        if num_blocks > len(match.keys):
            raise ValueError("more than it has")
        self.unpin(match.keys[num_blocks:])
        del match.keys[num_blocks:]

    def num_pinned_only_by(self, matches: Sequence[NaiveMatch]) -> int:
        counts = Counter(key for match in matches for key in match.keys)
        return self.on_device([key for key, count in counts.items() if count == self.blocks[key].pins])

    # --- looks ---

    def common(self, tokens: Sequence[int], namespace: bytes) -> tuple[int, set[int]]:
        """Return how many tokens the longest path shares, and which tokens the cached paths have after them."""
        paths = [path for name, path in self.blocks if name == namespace]
        most = max((common_prefix(path, tokens) for path in paths), default=0)
        return most, {p[most] for p in paths if len(p) > most and common_prefix(p, tokens[:most]) == most}

    def eviction_order(self) -> list[Key]:
        return sorted(self.used, key=lambda key: self.blocks[key].priority)

    # --- copies ---

    def promote(self, match: NaiveMatch, ids: Sequence[int]) -> list[tuple[Host, int]]:
        self.check_live(match)
        host_only = [key for key in match.keys if self.blocks[key].device is None]
        if len(ids) > len(host_only):
            raise ValueError("too many")
        self.adopt(ids, [])
        pairs = []
        for key, i in zip(host_only, ids, strict=False):
            self.blocks[key].device = i
            pairs.append((self.blocks[key].host, i))
        return pairs

    def write_out(self, match: NaiveMatch) -> list[tuple[int, Host]]:
        self.check_live(match)
        pairs = []
        for key in match.keys:
            block = self.blocks[key]
            if block.host or block.device is None:
                continue
            if not self.find_host():
                break
            block.host = Host()
            self.num_free_host -= 1
            pairs.append((block.device, block.host))
        return pairs

    def send_out(self, match: NaiveMatch) -> list[tuple[int, Host]]:
        self.check_live(match)
        pairs = []
        for key in reversed(match.keys):
            block = self.blocks[key]
            below = [k for k in self.blocks if k[0] == key[0] and k[1][: len(key[1])] == key[1]]
            if block.pins > 1 or not set(below) <= set(match.keys) or not self.num_host_blocks:
                break
            if block.device is None:
                continue
            if block.host is None:
                if not self.find_host():
                    break
                block.host = Host()
                self.num_free_host -= 1
                pairs.append((block.device, block.host))
            self.free_device(key)
        return pairs

    def insert(
        self, tokens: Sequence[int], ids: Sequence[int], namespace: bytes, after: NaiveMatch | None, priority: int
    ) -> NaiveMatch:
        if len(tokens) != len(ids) * self.block_size:
            raise ValueError("lengths")
        if after and (not after.live or namespace or priority or self.on_device(after.keys) < len(after.keys)):
            raise ValueError("after")
        namespace, priority = (after.namespace, after.priority) if after else (namespace, priority)
        keys = self.keys(namespace, after.tokens if after else (), tokens)
        held = [self.blocks[key].device if key in self.blocks else None for key in keys]
        taken = [(key, i) for key, i, has in zip(keys, ids, held, strict=True) if has is None]
        surplus = [i for i, has in zip(ids, held, strict=True) if has is not None and has != i]
        self.adopt([i for _, i in taken], surplus)
        for key, i in taken:
            if key in self.blocks:
                self.blocks[key].device = i
            else:
                self.blocks[key] = NaiveBlock(i)
        result = self.pinned(namespace, (after.keys if after else []) + keys, priority)
        if after:
            after.live = False
            for key in after.keys:
                self.blocks[key].pins -= 1
        return result

    def adopt(self, ids: Sequence[int], surplus: Sequence[int]) -> None:
        if len(set(ids)) < len(ids) or not all(self.pool.num_owned(i) == 1 for i in ids) or set(surplus) & set(ids):
            raise ValueError("not the caller's alone")
        self.pool.release(surplus)
        self.pool.cached.update(ids)

    # --- eviction ---

    def oldest(self, tier: str) -> Key | None:
        return next((key for key in self.eviction_order() if getattr(self.blocks[key], tier) is not None), None)

    def free_device(self, key: Key) -> None:
        block_id = self.blocks[key].device
        assert block_id is not None
        self.blocks[key].device = None
        self.pool.cached.remove(block_id)
        self.pool.release([block_id])

    def forget(self, key: Key) -> None:
        """The block and all that continues it."""
        namespace, path = key
        for other in [k for k in self.blocks if k[0] == namespace and k[1][: len(path)] == path]:
            assert self.blocks[other].pins == 0
            if self.blocks[other].device is not None:
                self.free_device(other)
            self.num_free_host += self.blocks[other].host is not None
            self.used.remove(other)
            self.dead |= {self.blocks.pop(other).companion} - {-1}

    def newest_copy(self) -> Key | None:
        """The block of the lowest priority whose host block was used last, if that is a copy of one on the device."""
        for priority in range(-1, NUM_PRIORITIES):
            keys = [key for key in self.used if self.blocks[key].host and self.blocks[key].priority == priority]
            if keys and self.blocks[keys[-1]].device is not None:
                return keys[-1]
        return None

    def evict_host_one(self) -> bool:
        key = self.newest_copy() or self.oldest("host")
        if key is None:
            return False
        if self.blocks[key].device is None:
            self.forget(key)
        else:
            self.blocks[key].host = None
            self.num_free_host += 1
        return True

    def find_host(self) -> bool:
        return self.num_free_host > 0 or self.evict_host_one()

    def evict_host(self, n: int) -> int:
        return sum(self.evict_host_one() for _ in range(n))

    def leave(self, n: int, may_copy: bool) -> tuple[int, list[tuple[int, Host]]]:
        pairs: list[tuple[int, Host]] = []
        for num_freed in range(n):
            key = self.oldest("device")
            if key is None:
                return num_freed, self.alive(pairs)
            block = self.blocks[key]
            if block.host is None and may_copy and block.priority >= 0 and self.find_host():
                block.host = Host()
                self.num_free_host -= 1
                assert block.device is not None
                pairs.append((block.device, block.host))
            if block.host is None:
                self.forget(key)
            else:
                self.free_device(key)
        return n, self.alive(pairs)

    def alive(self, pairs: list[tuple[int, Host]]) -> list[tuple[int, Host]]:
        held = {id(block.host) for block in self.blocks.values()}
        return [pair for pair in pairs if id(pair[1]) in held]

    def next_keys(self, key: Key) -> list[Key]:
        size = len(key[1])
        return [
            k for k in self.blocks if k[0] == key[0] and len(k[1]) == size + self.block_size and k[1][:size] == key[1]
        ]

    def put_first(self, tokens: Sequence[int], namespace: bytes, num_kept: int) -> int:
        keys, num_first, below = self.cached(tokens, namespace), 0, []
        for key in reversed(keys[-(-num_kept // self.block_size) :]):
            block = self.blocks[key]
            if (
                block.pins
                or block.priority < 0
                or self.next_keys(key) != below
                or block.use != self.blocks[keys[-1]].use
            ):
                break
            below = [key]
            num_first += self.block_size
        for key in reversed(keys[len(keys) - num_first // self.block_size :]):
            self.blocks[key].priority = -1
            self.used.remove(key)
            self.used.append(key)
        return num_first

    def drop(self, tokens: Sequence[int], namespace: bytes) -> int:
        keys = self.cached(tokens, namespace)
        num_dropped = 0
        for key in reversed(keys):
            if self.next_keys(key) or self.blocks[key].pins:
                break
            self.forget(key)
            num_dropped += self.block_size
        return num_dropped

    def drop_namespace(self, namespace: bytes) -> int:
        keys = [key for key in self.eviction_order() if key[0] == namespace]
        num_device = sum(self.blocks[key].device is not None for key in keys)
        for key in keys:
            self.forget(key)
        return num_device

    def clear(self) -> int:
        num_evictable = sum(self.blocks[key].device is not None for key in self.used)
        self.leave(num_evictable, False)
        self.evict_host(sum(self.blocks[key].host is not None for key in self.used))
        return num_evictable

"""Naive models of BlockPool and PrefixTree: a list, two dicts, and a record for every block.

They say what each operation must do, down to which block is evicted and which id comes next, and share no idea with the
real ones: here are no edges, no hashes, no lists of nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvpage import OutOfBlocks

Key = tuple[bytes, tuple[int, ...]]  # a namespace and all tokens up to the end of a block


class NaivePool:
    def __init__(self, num_blocks: int) -> None:
        self.counts = [0] * num_blocks
        self.free = list(range(num_blocks))[::-1]  # the next one to allocate is the last
        self.cached: set[int] = set()

    def allocate(self, n: int) -> list[int]:
        if n > len(self.free):
            raise OutOfBlocks(n, len(self.free))
        ids = [self.free.pop() for _ in range(n)]
        for i in ids:
            self.counts[i] = 1
        return ids

    def num_owned(self, i: int) -> int:
        """References that are not a tree's; 0 for an id that does not exist."""
        return self.counts[i] if 0 <= i < len(self.counts) and i not in self.cached else 0

    def share(self, ids: Sequence[int]) -> None:
        if not all(self.num_owned(i) for i in ids):
            raise ValueError(ids)
        for i in ids:
            self.counts[i] += 1

    def release(self, ids: Sequence[int]) -> None:
        if not all(self.num_owned(i) >= n for i, n in Counter(ids).items()):
            raise ValueError(ids)
        for i in reversed(ids):
            self.counts[i] -= 1
            if self.counts[i] == 0:
                self.free.append(i)


@dataclass
class Block:
    id: int
    pins: int = 0


@dataclass
class NaiveMatch:
    namespace: bytes
    tokens: tuple[int, ...]
    keys: list[Key]
    block_ids: list[int]
    live: bool = True


@dataclass
class NaiveTree:
    pool: NaivePool
    block_size: int
    blocks: dict[Key, Block] = field(default_factory=dict)
    unpinned: dict[Key, None] = field(default_factory=dict)  # least recently used first

    def keys(self, namespace: bytes, before: tuple[int, ...], tokens: Sequence[int]) -> list[Key]:
        path = (*before, *tokens)
        ends = range(len(before) + self.block_size, len(path) + 1, self.block_size)
        return [(namespace, path[:end]) for end in ends]

    def pinned(self, namespace: bytes, keys: list[Key]) -> NaiveMatch:
        for key in keys:
            self.blocks[key].pins += 1
            self.unpinned.pop(key, None)
        tokens = keys[-1][1] if keys else ()
        return NaiveMatch(namespace, tokens, keys, [self.blocks[key].id for key in keys])

    def match(self, tokens: Sequence[int], namespace: bytes = b"") -> NaiveMatch:
        cached = []
        for key in self.keys(namespace, (), tokens[: max(len(tokens) - 1, 0)]):
            if key not in self.blocks:
                break
            cached.append(key)
        return self.pinned(namespace, cached)

    def pin(self, match: NaiveMatch) -> NaiveMatch:
        if not match.live:
            raise ValueError("released")
        return self.pinned(match.namespace, match.keys)

    def release(self, match: NaiveMatch) -> None:
        if not match.live:
            raise ValueError("released")
        match.live = False
        for key in reversed(match.keys):
            self.blocks[key].pins -= 1
            if self.blocks[key].pins == 0:
                self.unpinned[key] = None

    def insert(
        self, tokens: Sequence[int], ids: Sequence[int], namespace: bytes = b"", after: NaiveMatch | None = None
    ) -> NaiveMatch:
        if len(tokens) != len(ids) * self.block_size or (after and (not after.live or namespace)):
            raise ValueError("lengths, or after")
        namespace = after.namespace if after else namespace
        keys = self.keys(namespace, after.tokens if after else (), tokens)
        fresh = [(key, i) for key, i in zip(keys, ids, strict=True) if key not in self.blocks]
        fresh_ids = [i for _, i in fresh]
        if len(set(fresh_ids)) < len(fresh_ids):
            raise ValueError("named twice")
        if not all(self.pool.num_owned(i) == 1 for i in fresh_ids):
            raise ValueError("not the caller's alone")
        surplus = [i for key, i in zip(keys, ids, strict=True) if key in self.blocks and self.blocks[key].id != i]
        if set(surplus) & set(fresh_ids):
            raise ValueError("given away and released")
        self.pool.release(surplus)
        for key, i in fresh:
            self.blocks[key] = Block(i)
            self.pool.cached.add(i)
        result = self.pinned(namespace, (after.keys if after else []) + keys)
        if after:
            after.live = False
            for key in after.keys:
                self.blocks[key].pins -= 1
        return result

    def evict(self, n: int) -> int:
        victims = list(self.unpinned)[:n]
        for key in victims:
            del self.unpinned[key]
            block_id = self.blocks.pop(key).id
            self.pool.cached.remove(block_id)
            self.pool.release([block_id])
        return len(victims)

    def clear(self) -> int:
        return self.evict(len(self.unpinned))

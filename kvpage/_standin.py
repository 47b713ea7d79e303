"""A plain Python pool and tree of the native ones' interface, a dict a block; gone when those land."""

import numpy as np

from kvpage.errors import OutOfBlocks


class BlockPool:
    def __init__(self, num_blocks):
        self.num_blocks, self._refs = num_blocks, [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))

    num_free = property(lambda self: len(self._free))

    def allocate(self, n):
        if n > len(self._free):
            raise OutOfBlocks(n, len(self._free))
        ids = [self._free.pop() for _ in range(n)]
        for i in ids:
            self._refs[i] = 1
        return np.array(ids, np.int32)

    def share(self, ids):
        for i in np.asarray(ids).tolist():
            self._refs[i] += 1

    def release(self, ids):
        for i in np.asarray(ids).tolist():
            if self._refs[i] < 1:
                raise ValueError(f"block {i} is free")
            self._refs[i] -= 1
            if self._refs[i] == 0:
                self._free.append(i)

    def ref_count(self, i):
        return self._refs[i]

    def check(self):
        if sorted(self._free) != [i for i, r in enumerate(self._refs) if r == 0]:
            raise RuntimeError("free list and reference counts differ")


class Match:
    def __init__(self, nodes, block_size, namespace):
        self.nodes, self.namespace, self.released = nodes, namespace, False
        self.num_blocks, self.num_tokens = len(nodes), len(nodes) * block_size

    block_ids = property(lambda self: self.block_ids_from(0))

    def block_ids_from(self, start):
        return np.array([n["id"] for n in self.nodes[start:]], np.int32)


class PrefixTree:
    def __init__(self, pool, block_size):
        self.pool, self.block_size, self._nodes, self._clock = pool, block_size, {}, 0

    num_cached = property(lambda self: len(self._nodes))
    num_evictable = property(lambda self: sum(n["pins"] == 0 for n in self._nodes.values()))

    def _pinned(self, nodes, namespace):
        for n in nodes:
            n["pins"] += 1
        return Match(nodes, self.block_size, namespace)

    def _keys(self, tokens, key):
        for i in range(0, len(tokens) - self.block_size + 1, self.block_size):
            key = (key, tuple(tokens[i : i + self.block_size].tolist()))
            yield key

    def match(self, tokens, namespace=b""):
        nodes = []
        for key in self._keys(np.asarray(tokens)[: max(len(tokens) - 1, 0)], namespace):
            if key not in self._nodes:
                break
            nodes.append(self._nodes[key])
        return self._pinned(nodes, namespace)

    def pin(self, match):
        return self._pinned(match.nodes, match.namespace)

    def insert(self, tokens, block_ids, namespace=b"", after=None):
        nodes = list(after.nodes) if after else []
        key = nodes[-1]["key"] if nodes else (after.namespace if after else namespace)
        for key, i in zip(self._keys(np.asarray(tokens), key), np.asarray(block_ids).tolist(), strict=True):
            if key in self._nodes:
                self.pool.release([i])
            else:
                assert self.pool.ref_count(i) == 1
                self._nodes[key] = {"key": key, "id": i, "pins": 0, "used": 0}
            nodes.append(self._nodes[key])
        result = self._pinned(nodes, after.namespace if after else namespace)
        if after:
            self.release(after)
        return result

    def release(self, match):
        assert not match.released
        match.released = True
        for n in reversed(match.nodes):
            self._clock += 1
            n["pins"], n["used"] = n["pins"] - 1, self._clock

    def evict(self, num):
        victims = sorted((n for n in self._nodes.values() if not n["pins"]), key=lambda n: n["used"])[:num]
        for n in victims:
            del self._nodes[n["key"]]
        self.pool.release([n["id"] for n in victims])
        return len(victims)

    def check(self):
        if len({n["id"] for n in self._nodes.values()}) != len(self._nodes):
            raise RuntimeError("a block is cached twice")

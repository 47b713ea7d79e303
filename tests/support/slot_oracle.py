"""An oracle of PrefixCacheManager: every prefix is a tuple, and every question a search over all of them."""

from collections import Counter

Prefix = tuple[int, ...]


class SlotOracle:
    """The tree's edges are found again after each change: runs of prefixes between points where something ends."""

    def __init__(self, max_capacity: int) -> None:
        self.max_capacity = max_capacity
        self.used: dict[Prefix, int] = {}  # all prefixes in the tree, by last use
        self.held: dict[int, tuple[Prefix, int]] = {}  # by slot
        self.pins: Counter[Prefix] = Counter()
        self.clock = 0

    # --- structure ---

    def children(self, prefix: Prefix) -> list[Prefix]:
        return [p for p in self.used if len(p) == len(prefix) + 1 and p[:-1] == prefix]

    def is_end(self, prefix: Prefix) -> bool:
        ends = {sequence for sequence, _ in self.held.values()}
        return prefix in ends or self.pins[prefix] > 0 or len(self.children(prefix)) != 1

    def edges(self) -> list[list[Prefix]]:
        return [self.edge_to(prefix) for prefix in self.used if self.is_end(prefix)]

    def edge_to(self, end: Prefix) -> list[Prefix]:
        edge = [end]
        while len(edge[0]) > 1 and not self.is_end(edge[0][:-1]):
            edge.insert(0, edge[0][:-1])
        return edge

    def path_edges(self, prefix: Prefix) -> list[list[Prefix]]:
        """Return the edges from the one that has `prefix` upward."""
        while prefix and not self.is_end(prefix):
            prefix = self.children(prefix)[0]
        edges = []
        while prefix:
            edges.append(self.edge_to(prefix))
            prefix = edges[-1][0][:-1]
        return edges

    def is_pinned(self, prefix: Prefix) -> bool:
        return any(count > 0 and pin[: len(prefix)] == prefix for pin, count in self.pins.items())

    def is_held(self, prefix: Prefix) -> bool:
        return any(sequence[: len(prefix)] == prefix for sequence, _ in self.held.values())

    def use(self, edges: list[list[Prefix]]) -> None:
        for edge in edges:
            if self.is_pinned(edge[-1]):
                continue
            self.clock += 1
            self.used.update(dict.fromkeys(edge, self.clock))

    def settle(self) -> int:
        """Remove edges neither held nor pinned; joined edges were used when their latest part was; then eviction."""
        self.used = {p: t for p, t in self.used.items() if self.is_held(p) or self.is_pinned(p)}
        self.pins += Counter()
        for edge in self.edges():
            self.used.update(dict.fromkeys(edge, max(self.used[p] for p in edge)))
        while len(self.used) > self.max_capacity:
            leaves = [e for e in self.edges() if not self.children(e[-1]) and not self.is_pinned(e[-1])]
            if not leaves:
                break
            self.shorten(min(leaves, key=lambda edge: self.used[edge[-1]]))
        return self.num_over

    def shorten(self, edge: list[Prefix]) -> None:
        gone = edge[-(len(self.used) - self.max_capacity) :]
        left = gone[0][:-1]
        for prefix in gone:
            del self.used[prefix]
        for slot, (sequence, version) in list(self.held.items()):
            if sequence in gone:
                self.held[slot] = (left, version)
                if not left:
                    del self.held[slot]

    # --- the methods of the manager ---

    @property
    def num_over(self) -> int:
        return max(len(self.used) - self.max_capacity, 0)

    def insert(self, tokens: Prefix, slot: int, version: int) -> int:
        for n in range(1, len(tokens) + 1):
            self.used.setdefault(tokens[:n], 0)
        self.pins[tokens] += 1
        self.held[slot] = (tokens, version)
        return self.settle()

    def longest(self, tokens: Prefix) -> int:
        return max((n for n in range(1, len(tokens) + 1) if self.is_held(tokens[:n])), default=0)

    def slots_with(self, prefix: Prefix) -> set[tuple[int, int]]:
        return {(slot, version) for slot, (seq, version) in self.held.items() if seq[: len(prefix)] == prefix}

    def find(self, tokens: Prefix) -> int:
        n = self.longest(tokens)
        self.use(self.path_edges(tokens[:n]))
        return n

    def pin(self, tokens: Prefix) -> int:
        n = self.longest(tokens)
        if n:
            self.pins[tokens[:n]] += 1
        return n

    def release(self, tokens: Prefix) -> None:
        edges = self.path_edges(tokens)
        self.pins[tokens] -= 1
        self.use(edges)
        self.settle()

    def withdraw(self, slot: int) -> bool:
        found = self.held.pop(slot, None) is not None
        self.settle()
        return found

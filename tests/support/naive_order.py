"""NaiveOrder: which record goes next, by sorting all of them by what each policy asks for."""

from collections.abc import Callable, Hashable
from typing import Any


class NaiveOrder:
    """Records by any names. A moment passes with each call that changes it."""

    def __init__(self, policy: str) -> None:
        self.policy, self.now = policy, 0
        self.born: dict[Hashable, int] = {}
        self.used: dict[Hashable, int] = {}
        self.num_uses: dict[Hashable, int] = {}

    def add(self, name: Hashable) -> None:
        assert name not in self.born
        self.now += 1
        self.born[name] = self.used[name] = self.now
        self.num_uses[name] = 0

    def use(self, name: Hashable) -> None:
        self.now += 1
        self.used[name] = self.now
        self.num_uses[name] += 1

    def remove(self, name: Hashable) -> None:
        self.now += 1
        for table in (self.born, self.used, self.num_uses):
            del table[name]

    def victims(self) -> list[Any]:
        """All names, the first to go first. cost: as long as it has learned nothing."""
        num_read = sum(count > 0 for count in self.num_uses.values())
        is_over = 5 * num_read > 4 * len(self.born)
        keys: dict[str, Callable[[Hashable], object]] = {
            "lru": self.used.__getitem__,
            "slru": lambda name: ((self.num_uses[name] > 0) != is_over, self.used[name]),
            "lfu": lambda name: (self.num_uses[name], self.used[name]),
            "fifo": self.born.__getitem__,
            "cost": self.used.__getitem__,
        }
        return sorted(self.born, key=keys[self.policy])

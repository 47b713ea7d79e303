"""NaivePool: BlockPool as a list of counts and a list of free ids. It says which ids an allocation gets, too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

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

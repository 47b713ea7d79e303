"""UserPins: cached prefixes that a user keeps, within a quota and for a time. A request takes precedence over them."""

import numbers
import time
from bisect import bisect_left
from collections.abc import Callable

from kvpage._C import Match, PrefixTree
from kvpage.checks.values import as_integer, check_at_least


class UserPins:
    """Matches by handle, the oldest first. Not thread-safe.

    quota: Blocks that all pins may hold together. A prefix that two pins share counts twice.
    """

    def __init__(self, tree: PrefixTree, quota: int, clock: Callable[[], float] = time.monotonic) -> None:
        check_at_least("quota", quota, 0)
        self.quota = quota
        self._tree = tree
        self._clock = clock
        self._pins: dict[int, tuple[Match, float]] = {}  # by handle: the match, and when it ends
        self._num_handles = 0

    @property
    def num_blocks(self) -> int:
        """Number of blocks that all pins hold."""
        pins = list(self._pins.values())  # all at once: statistics may be asked for in another thread
        return sum(match.num_blocks for match, _ in pins)

    @property
    def matches(self) -> list[Match]:
        """The matches of all pins, which stay theirs."""
        return [match for match, _ in self._pins.values()]

    def __len__(self) -> int:
        return len(self._pins)

    def add(self, match: Match, ttl: float | None) -> int:
        """Take over a match until its time is over, and return a handle.

        ttl: Seconds; None for no limit.

        Raises:
            ValueError: It exceeds the quota, or `ttl` is not positive. The match stays the caller's.
            TypeError: `ttl` is no number.
        """
        if ttl is not None and not isinstance(ttl, numbers.Real):
            raise TypeError(f"ttl must be a number of seconds or None, got {type(ttl).__name__}")
        if ttl is not None and not ttl > 0:
            raise ValueError(f"ttl must be positive, got {ttl!r}")
        self.expire()
        num_pinned = self.num_blocks
        if num_pinned + match.num_blocks > self.quota:
            raise ValueError(f"pins must hold at most {self.quota} blocks, got {num_pinned} + {match.num_blocks}")
        self._num_handles += 1
        self._pins[self._num_handles] = match, float("inf") if ttl is None else self._clock() + ttl
        return self._num_handles

    def num_blocks_of(self, handle: int) -> int:
        """Return how many blocks a pin holds; 0 if it has ended."""
        return self._pins[handle][0].num_blocks if handle in self._pins else 0

    def remove(self, handle: int) -> None:
        """End a pin. One that has ended already is no error; an unknown handle is a KeyError."""
        if not 1 <= as_integer("handle", handle) <= self._num_handles:
            raise KeyError(handle)
        if handle in self._pins:
            self._tree.release(self._pins.pop(handle)[0])

    def clear(self) -> None:
        """End all pins."""
        for handle in list(self._pins):
            self.remove(handle)

    def expire(self) -> None:
        """End the pins whose time is over."""
        now = self._clock()
        for handle in [handle for handle, (_, end) in self._pins.items() if end <= now]:
            self.remove(handle)

    def give_up(self, num_blocks: int) -> None:
        """End the oldest pins, as few as possible, so that `num_blocks` more device blocks can be evicted.

        No pin ends where the end of all of them would not be enough.
        """
        matches, handles = [match for match, _ in self._pins.values()], list(self._pins)
        counts = range(len(matches) + 1)
        most = bisect_left(counts, num_blocks, key=lambda count: self._tree.num_pinned_only_by(matches[:count]))
        for handle in handles[: most if most in counts else 0]:
            self.remove(handle)

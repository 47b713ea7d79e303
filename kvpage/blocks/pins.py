"""UserPins: cached prefixes that users keep, within quotas and for a time. A request takes precedence over them."""

import numbers
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

from kvpage._C import Match, PrefixTree
from kvpage.checks.values import as_integer, check_at_least


class QuotaExceeded(ValueError):
    """Pins would hold more blocks than a quota allows."""


@dataclass(frozen=True, slots=True)
class PinTerms:
    """For how long, how strongly and for whom a prefix is kept.

    Attributes:
        ttl: Seconds; None for no limit.
        priority: Where a request needs room, pins of lower numbers end first, and of these the oldest.
        owner: Who keeps it, such as a tenant.
        owner_quota: Blocks that all pins of this owner may hold together; None for all of the quota.

    Raises:
        ValueError: A number is out of range.
        TypeError: One is of another type.
    """

    ttl: float | None = None
    priority: int = 0
    owner: bytes = b""
    owner_quota: int | None = None

    def __post_init__(self) -> None:
        if self.ttl is not None and not isinstance(self.ttl, numbers.Real):
            raise TypeError(f"ttl must be a number of seconds or None, got {type(self.ttl).__name__}")
        if self.ttl is not None and not self.ttl > 0:
            raise ValueError(f"ttl must be positive, got {self.ttl!r}")
        as_integer("priority", self.priority)
        if not isinstance(self.owner, bytes):
            raise TypeError(f"owner must be bytes, got {type(self.owner).__name__}")
        if self.owner_quota is not None:
            check_at_least("owner_quota", self.owner_quota, 0)


@dataclass(frozen=True, slots=True)
class _Pin:
    match: Match
    end: float
    priority: int
    owner: bytes


FOR_EVER = PinTerms()


class UserPins:
    """Matches by handle, the oldest first. Not thread-safe.

    quota: Blocks that all pins may hold together. A prefix that two pins share counts twice.
    """

    def __init__(self, tree: PrefixTree, quota: int, clock: Callable[[], float] = time.monotonic) -> None:
        check_at_least("quota", quota, 0)
        self.quota = quota
        self._tree = tree
        self._clock = clock
        self._pins: dict[int, _Pin] = {}
        self._num_handles = 0

    @property
    def num_blocks(self) -> int:
        """Number of blocks that all pins hold."""
        pins = list(self._pins.values())  # all at once: statistics may be asked for in another thread
        return sum(pin.match.num_blocks for pin in pins)

    @property
    def matches(self) -> list[Match]:
        """The matches of all pins, which stay theirs."""
        return [pin.match for pin in self._pins.values()]

    def __len__(self) -> int:
        return len(self._pins)

    def add(self, match: Match, terms: PinTerms = FOR_EVER, in_place_of: int | None = None) -> int:
        """Take over a match until its time is over, and return a handle.

        in_place_of: A pin that ends with this, and does not count in the quotas.

        Raises:
            QuotaExceeded: It exceeds a quota. The match stays the caller's, and the other pin as it is.
        """
        self.expire()
        others = [pin for handle, pin in self._pins.items() if handle != in_place_of]
        _check_quota("pins", self.quota, others, match)
        if terms.owner_quota is not None:
            of_owner = [pin for pin in others if pin.owner == terms.owner]
            _check_quota("pins of a tenant", terms.owner_quota, of_owner, match)
        if in_place_of is not None:
            self.remove(in_place_of)
        self._num_handles += 1
        end = float("inf") if terms.ttl is None else self._clock() + terms.ttl
        self._pins[self._num_handles] = _Pin(match, end, terms.priority, terms.owner)
        return self._num_handles

    def match_of(self, handle: int) -> Match | None:
        """Return the match of a pin, which stays its own; None if it has ended."""
        pin = self._pins.get(handle)
        return None if pin is None else pin.match

    def num_blocks_of(self, handle: int) -> int:
        """Return how many blocks a pin holds; 0 if it has ended, or its time is over."""
        pin = self._pins.get(handle)
        return 0 if pin is None or pin.end <= self._clock() else pin.match.num_blocks

    def remove(self, handle: int) -> None:
        """End a pin. One that has ended already is no error; an unknown handle is a KeyError."""
        if not 1 <= as_integer("handle", handle) <= self._num_handles:
            raise KeyError(handle)
        if handle in self._pins:
            self._tree.release(self._pins.pop(handle).match)

    def clear(self) -> None:
        """End all pins."""
        for handle in list(self._pins):
            self.remove(handle)

    def expire(self) -> None:
        """End the pins whose time is over."""
        now = self._clock()
        for handle in [handle for handle, pin in self._pins.items() if pin.end <= now]:
            self.remove(handle)

    def give_up(self, num_blocks: int) -> None:
        """End pins, as few as possible in their order, so that `num_blocks` more device blocks can be evicted.

        The lowest priority ends first, and of one priority the oldest. No pin ends where the end of all of them would
        not be enough.
        """
        handles = sorted(self._pins, key=lambda handle: (self._pins[handle].priority, handle))
        matches = [self._pins[handle].match for handle in handles]
        counts = range(len(matches) + 1)
        most = bisect_left(counts, num_blocks, key=lambda count: self._tree.num_pinned_only_by(matches[:count]))
        for handle in handles[: most if most in counts else 0]:
            self.remove(handle)


def _check_quota(name: str, quota: int, others: list[_Pin], match: Match) -> None:
    num_pinned = sum(pin.match.num_blocks for pin in others)
    if num_pinned + match.num_blocks > quota:
        raise QuotaExceeded(f"{name} must hold at most {quota} blocks, got {num_pinned} + {match.num_blocks}")

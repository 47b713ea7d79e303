"""RecordCopies: copies of records from one tier into another, which a removal or replacement of the record ends.

    begin([key]) ─► open ─► verify, copy ─► finish(tier): commit, unless a change of the key has come between
    change([key]) ─► copies under way, or begun meanwhile, are unwanted ─► settle(tier) ─► remove, or write anew

A copy begins before its reader is opened. Otherwise a removed record would come back out of a reader that was open
then, and a replaced one would take its successor's place.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvpage.store.tiers.tier import Key


class RecordCopy:
    """A copy of the records of these keys, under way. unwanted: keys that were changed since."""

    __slots__ = ("keys", "unwanted")

    def __init__(self, keys: Sequence[Key]) -> None:
        self.keys = keys
        self.unwanted: set[Key] = set()


class Change:
    """A removal or a replacement under way. keys: None for all."""

    __slots__ = ("keys",)

    def __init__(self, keys: Sequence[Key] | None) -> None:
        self.keys = None if keys is None else frozenset(keys)

    def of(self, copy: RecordCopy) -> set[Key]:
        """Return the copy's keys that it changes."""
        return {key for key in copy.keys if self.keys is None or key in self.keys}


class RecordCopies:
    """The copies and changes that are under way. Thread-safe.

    While a tier works, only the lock of that tier is held. So only a change of a slow tier's records waits for it.
    """

    def __init__(self, num_tiers: int) -> None:
        self._lock = threading.Lock()
        self._copies: set[RecordCopy] = set()
        self._changes: set[Change] = set()
        self._committing = [threading.Lock() for _ in range(num_tiers)]

    @property
    def num_under_way(self) -> int:
        return len(self._copies)

    def begin(self, keys: Sequence[Key], change: Change | None = None) -> RecordCopy:
        """Begin a copy before its records are opened; `end` it. change: the one that the copy is part of."""
        copy = RecordCopy(keys)
        with self._lock:
            for other in self._changes - {change}:
                copy.unwanted |= other.of(copy)
            self._copies.add(copy)
        return copy

    def end(self, copy: RecordCopy) -> None:
        with self._lock:
            self._copies.discard(copy)

    @contextmanager
    def finish(self, at: int, copy: RecordCopy, key: Key) -> Iterator[bool]:
        """Yield whether the record is still wanted. Inside, it can be committed to the tier of that number."""
        with self._committing[at]:
            yield self.is_wanted(copy, key)

    def is_wanted(self, copy: RecordCopy, key: Key) -> bool:
        with self._lock:
            return key not in copy.unwanted

    @contextmanager
    def change(self, keys: Sequence[Key] | None) -> Iterator[Change]:
        """Enter a block in which records of these keys (None: all) may be changed, in each tier after `settle`."""
        change = Change(keys)
        with self._lock:
            self._changes.add(change)
            for copy in self._copies:
                copy.unwanted |= change.of(copy)
        try:
            yield change
        finally:
            with self._lock:
                self._changes.discard(change)

    def settle(self, at: int) -> None:
        """Wait for the copy that is being committed to the tier. Later ones see the change."""
        with self._committing[at]:
            pass

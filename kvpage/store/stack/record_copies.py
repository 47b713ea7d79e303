"""RecordCopies: records on their way from one tier into another, and what ends them: their removal or replacement.

    begin([key]) ─► open ─► verify, copy ─► finish(tier): commit, unless a change of the key has come between
    change([key]) ─► what is under way is unwanted, and what begins meanwhile ─► settle(tier) ─► remove, or write anew

A copy begins before its reader is opened. Otherwise what was removed would come back out of a reader that was open
then, and what was replaced would come over its successor.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvpage.store.tiers.tier import Key


class RecordCopy:
    """Records of these keys, on their way. unwanted: those of them that were changed since."""

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
        """Which of the copy's keys it changes."""
        return {key for key in copy.keys if self.keys is None or key in self.keys}


class RecordCopies:
    """Thread-safe. No lock is held while a tier works but that of the tier itself: who waits for a slow one is who
    changes what it has.
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
        """To be called before the records are opened; `end` it. change: the one that the copy is part of."""
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
        """Whether the record is wanted still; inside, it can be committed to the tier of that number."""
        with self._committing[at]:
            yield self.is_wanted(copy, key)

    def is_wanted(self, copy: RecordCopy, key: Key) -> bool:
        with self._lock:
            return key not in copy.unwanted

    @contextmanager
    def change(self, keys: Sequence[Key] | None) -> Iterator[Change]:
        """Inside, records of these keys (None: all) are changed, in each tier behind `settle`."""
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
        """Waits for the copy that is being committed to the tier; later ones know of the change."""
        with self._committing[at]:
            pass

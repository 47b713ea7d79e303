"""RecordCopies: writes of records under way, which a removal or replacement of the record ends.

    begin([key]) ─► open or encode, write ─► finish(tier): commit, unless a change of the key has come between
    change([key]) ─► writes under way, or begun meanwhile, are unwanted ─► settle(tier) ─► remove, or write anew

A write is a copy of a record from one tier into another, or a record that a caller puts. It begins before its record is
looked for. Otherwise a removed record would come back out of a reader that was open then, and a replaced one would
take its successor's place in some tiers.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvpage.store.tiers.tier import Key


class RecordCopy:
    """A write of the records of these keys, under way.

    change: the one that the write is part of, or None. unwanted: keys that others have changed since.
    """

    __slots__ = ("change", "keys", "unwanted")

    def __init__(self, keys: Sequence[Key], change: "Change | None") -> None:
        self.keys, self.change = keys, change
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
    """The writes and changes that are under way. Thread-safe.

    A change waits for a commit of its own keys alone, and for one tier at a time. Commits of others go on meanwhile.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._committed = threading.Condition(self._lock)
        self._copies: set[RecordCopy] = set()
        self._changes: set[Change] = set()
        self._committing: set[tuple[int, RecordCopy, Key]] = set()

    @property
    def num_under_way(self) -> int:
        return len(self._copies)

    def begin(self, keys: Sequence[Key], change: Change | None = None) -> RecordCopy:
        """Begin a write before its records are opened; `end` it. change: the one that the write is part of."""
        copy = RecordCopy(keys, change)
        with self._lock:
            for other in self._changes - {change}:
                copy.unwanted |= other.of(copy)
            self._copies.add(copy)
        return copy

    def end(self, copy: RecordCopy) -> None:
        with self._lock:
            self._copies.discard(copy)

    @contextmanager
    def under_way(self, keys: Sequence[Key], change: Change | None = None) -> Iterator[RecordCopy]:
        """Enter a block in which a write is under way; see `begin`."""
        copy = self.begin(keys, change)
        try:
            yield copy
        finally:
            self.end(copy)

    @contextmanager
    def finish(self, at: int, copy: RecordCopy, key: Key) -> Iterator[bool]:
        """Yield whether the record is still wanted. Inside, it can be committed to the tier of that number."""
        commit = (at, copy, key)
        with self._lock:
            is_wanted = key not in copy.unwanted
            if is_wanted:
                self._committing.add(commit)
        try:
            yield is_wanted
        finally:
            with self._lock:
                self._committing.discard(commit)
                self._committed.notify_all()

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
        """Wait for unwanted records that are being committed to the tier. Later ones see the change."""
        with self._lock:
            self._committed.wait_for(lambda: not any(self._is_late(at, commit) for commit in self._committing))

    @staticmethod
    def _is_late(at: int, commit: tuple[int, RecordCopy, Key]) -> bool:
        tier, copy, key = commit
        return tier == at and key in copy.unwanted

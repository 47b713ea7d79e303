"""BlockEvents: the store's events for vLLM's routers: chunks that came into some place, or left the last one.

memory, disk     ─► ByteStore.follow ─► places of each chunk ─► changes since vLLM took the last ones
another place    ─► the end of a job ─► stored; such a place tells no losses

The store may lose events where very many come at once. Then it is asked for every chunk that it is believed to have.
"""

import threading
from collections import deque
from collections.abc import Iterable, Sequence

from kvpage.store import ByteEvent, ByteStore

TELLING = ("memory", "disk")
"""Schemes of places that tell which chunks come and go."""
MAX_WAITING = 1 << 16  # keys that vLLM has not taken, of places that do not tell
MAX_LATE = 1 << 17  # events that may come after a loss, and are older: a store lets 65,536 wait
SOMEWHERE = 1 << 62  # among the places of a chunk: the store has it, and was asked, since events were lost

Change = tuple[bool, list[bytes]]
"""(whether the chunks were removed, their keys)"""


class BlockEvents:
    """Collects changes in a thread of the store, until vLLM's scheduler takes them.

    Args:
        store: It stays the caller's.
        tiers: URLs of its places.
        prefix: Of the keys in the store that are vLLM's, and that vLLM does not know.
    """

    def __init__(self, store: ByteStore, tiers: Sequence[str], prefix: bytes) -> None:
        self._store, self._prefix = store, prefix
        self._lock = threading.Lock()
        self._stored: deque[bytes] = deque(maxlen=MAX_WAITING)
        self._num_dropped = self._num_lost = self._num_late = 0
        self._keys: dict[bytes, bytes] = {}  # of the names of chunks that are there
        self._places: dict[bytes, int] = {}  # of these names, a bit each
        self._before: dict[bytes, tuple[bool, bytes]] = {}  # the last news for vLLM of chunks that have changed
        self._is_told = all(url.partition(":")[0] in TELLING for url in tiers)
        self._follow = store.follow(self._note) if self._is_told else None

    @property
    def num_lost(self) -> int:
        """Return how many events were lost."""
        with self._lock:
            return self._num_lost + self._num_dropped

    def stored(self, keys: Iterable[bytes]) -> None:
        """Note chunks that a job has stored, where no place tells.

        Args:
            keys: Of the chunks in the store.
        """
        if not self._is_told:
            with self._lock:
                new = [key.removeprefix(self._prefix) for key in keys if key.startswith(self._prefix)]
                self._num_dropped += max(len(self._stored) + len(new) - MAX_WAITING, 0)
                self._stored.extend(new)

    def take(self) -> list[Change]:
        """Return the changes since the last call. Of places that do not tell, the last 65,536 keys."""
        with self._lock:
            waiting = [*self._before.values(), *((False, key) for key in self._stored)]
            self._before.clear()
            self._stored.clear()
        changes = list[Change]()
        for is_removed, key in waiting:
            if not changes or changes[-1][0] != is_removed:
                changes.append((is_removed, []))
            changes[-1][1].append(key)
        return changes

    def renew(self, prefix: bytes) -> None:
        """Forget all chunks: chunks of other keys count from now on.

        Args:
            prefix: Of the keys.
        """
        with self._lock:
            for name, key in list(self._keys.items()):
                self._set(name, key, 0)
            self._stored.clear()
            self._prefix = prefix

    def close(self) -> None:
        """Listen no more."""
        if self._follow is not None:
            self._follow.close()

    # --- in the store's thread ---

    def _note(self, events: Sequence[ByteEvent]) -> None:
        prefix, unsure = self._unsure(events)
        there = self._store.contains([prefix + key for key in unsure.values()]) if unsure else []
        with self._lock:
            for event in events:
                key = self._key_of(event)
                if key is not None and event.name not in unsure:
                    bit, places = 1 << event.tier, self._places.get(event.name, 0)
                    self._set(event.name, key, places | bit if event.is_stored else places & ~bit)
            if prefix == self._prefix:
                for (name, key), is_there in zip(unsure.items(), there, strict=True):
                    self._set(name, key, SOMEWHERE if is_there else 0)

    def _unsure(self, events: Sequence[ByteEvent]) -> tuple[bytes, dict[bytes, bytes]]:
        """Return the prefix, and names and keys of chunks that the events do not tell enough of."""
        num_lost = self._store.stats().lost_events
        with self._lock:
            unsure = dict[bytes, bytes]()
            if num_lost > self._num_lost:
                self._num_lost, self._num_late = num_lost, MAX_LATE
                unsure.update(self._keys)
            for event in events:
                key = self._key_of(event)
                if key is not None and (self._num_late or self._places.get(event.name, 0) & SOMEWHERE):
                    unsure[event.name] = key
            self._num_late = max(self._num_late - len(events), 0)
            return self._prefix, unsure

    def _key_of(self, event: ByteEvent) -> bytes | None:
        """Return vLLM's key of the record; None if it is not known to be a chunk of the prefix."""
        if event.key is not None and event.is_stored and event.key.startswith(self._prefix):
            return event.key.removeprefix(self._prefix)
        return self._keys.get(event.name)

    def _set(self, name: bytes, key: bytes, places: int) -> None:
        """Note where a chunk is now. Two changes of one chunk are none."""
        had = name in self._places
        if places:
            self._places[name], self._keys[name] = places, key
        else:
            self._places.pop(name, None)
            self._keys.pop(name, None)
        if had != bool(places) and self._before.pop(name, None) is None:
            self._before[name] = had, key

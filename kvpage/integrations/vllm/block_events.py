"""BlockEvents: what vLLM's routers are told of the store: chunks that came into some place, or left the last one.

memory, disk     ─► ByteStore.follow ─► places of each chunk ─► stored, removed
another place    ─► the end of a job ─► stored; nobody tells what such a place loses
"""

import threading
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence

from kvpage.store import ByteEvent, ByteStore

TELLING = ("memory", "disk")
"""Schemes of places that tell what comes and goes."""
MAX_WAITING = 1 << 16  # keys that vLLM has not taken

Change = tuple[bool, list[bytes]]
"""(whether the chunks were removed, their keys)"""


class BlockEvents:
    """Collects changes in a thread of the store, until vLLM's scheduler takes them.

    Args:
        store: It stays the caller's.
        tiers: URLs of its places.
    """

    def __init__(self, store: ByteStore, tiers: Sequence[str]) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[tuple[bool, bytes]] = deque(maxlen=MAX_WAITING)
        self._places: defaultdict[bytes, set[int]] = defaultdict(set)
        self._is_told = all(url.partition(":")[0] in TELLING for url in tiers)
        if self._is_told:
            store.follow(self._note)

    def stored(self, keys: Iterable[bytes]) -> None:
        """Note chunks that a job has stored, where no place tells.

        Args:
            keys: Of the chunks.
        """
        if not self._is_told:
            with self._lock:
                self._waiting.extend((False, key) for key in keys)

    def take(self) -> list[Change]:
        """Return the changes since the last call, in order. Of more than 65,536 keys the oldest are lost."""
        with self._lock:
            waiting, changes = list(self._waiting), list[Change]()
            self._waiting.clear()
        for is_removed, key in waiting:
            if not changes or changes[-1][0] != is_removed:
                changes.append((is_removed, []))
            changes[-1][1].append(key)
        return changes

    def _note(self, events: Sequence[ByteEvent]) -> None:
        with self._lock:
            for event in events:
                if event.key is not None:
                    self._note_one(event.key, event.tier, event.is_stored)

    def _note_one(self, key: bytes, tier: int, is_stored: bool) -> None:
        places = self._places[key]
        had = bool(places)
        (places.add if is_stored else places.discard)(tier)
        if not places:
            del self._places[key]
        if had != bool(places):
            self._waiting.append((had, key))

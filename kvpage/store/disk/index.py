"""Index: the entry of each key, the order of eviction, and the entries that are forgotten but not yet marked free.

Nothing here touches the disk. Nothing is thread-safe: callers hold the tier's lock.
"""

import time
from collections.abc import Collection, Iterator

from kvpage.store.disk.drive import Drive
from kvpage.store.disk.space import Entry, Space
from kvpage.store.tiers.policy import VictimOrder
from kvpage.store.tiers.tier import Key, Note, RecordInfo

OLDEST_SECONDS = 1e8  # that a record counts as old, if a clock was wrong


class Index:
    """Finds entries by key.

    forgotten: entries that no key leads to any more, and that the disk still has as records.
    """

    def __init__(self, victims: VictimOrder) -> None:
        self.forgotten: list[Entry] = []
        self.generation = self.num_bytes = self.num_evicted = self.num_corrupted = 0
        self._order = victims
        self._entries: dict[Key, Entry] = {}
        self._note: Note | None = None

    def watch(self, note: Note | None) -> None:
        self._note = note

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def keys(self) -> list[Key]:
        return list(self._entries)

    def has(self, keys: Collection[Key]) -> list[bool]:
        """Return for each key whether there is an entry."""
        return [key in self._entries for key in keys]

    def infos(self) -> list[RecordInfo]:
        return [RecordInfo(key, entry.run.num_bytes, entry.last_used) for key, entry in self._entries.items()]

    def use(self, key: Key) -> Entry | None:
        """Return the entry, which has one user more now."""
        entry = self.touch(key)
        if entry is not None:
            entry.num_users += 1
        return entry

    def touch(self, key: Key) -> Entry | None:
        """Return the entry, which goes later now."""
        entry = self._entries.get(key)
        if entry is not None:
            self._order.use(key)
            entry.last_used = time.time()
        return entry

    def next_generation(self) -> int:
        """Return a number higher than all that were found here.

        As far as clocks go forward, it is also higher than the generations of directories that join later.
        """
        self.generation = max(self.generation + 1, time.time_ns() // 1000)
        return self.generation

    def add(self, entry: Entry, age: float = 0.0) -> None:
        """Put the entry in the place of the key's former one. age: seconds since it was written."""
        key = entry.key
        self.forget(key)
        entry.is_findable, entry.last_used = True, entry.run.written
        self._entries[key] = entry
        self._order.add(key, age)
        self.num_bytes += entry.run.num_bytes
        if self._note is not None:
            self._note(key, "written")

    def find(self, entries: Iterator[Entry]) -> None:
        """Add the entries that were found on the disk, the oldest first. Of several of one key the newest counts."""
        now = time.time()
        for entry in sorted(entries, key=lambda entry: entry.run.generation):
            there = self._entries.get(entry.key)
            if there is None or there.run.generation < entry.run.generation:
                self.add(entry, min(max(now - entry.run.written, 0.0), OLDEST_SECONDS))
            else:
                self.forgotten.append(entry)
            self.generation = max(self.generation, entry.run.generation)

    def forget(self, key: Key, reason: str | None = None) -> bool:
        """Return whether there was an entry. It cannot be found now, and is to be marked free.

        reason: of its going, to be noted; None for one that is replaced.
        """
        entry = self._entries.pop(key, None)
        if entry is None:
            return False
        self._order.remove(key, is_evicted=reason == "evicted")
        self.num_bytes -= entry.run.num_bytes
        entry.is_findable = False
        self.forgotten.append(entry)
        if reason is not None and self._note is not None:
            self._note(key, reason)
        return True

    def drop(self, entry: Entry) -> None:
        """Forget a record that turned out to be damaged."""
        if entry.is_findable:
            self.num_corrupted += 1
            self.forget(entry.key, "damaged")

    def lose(self, space: Space) -> None:
        """Forget all that is in a file that was deleted."""
        space.is_lost = True
        for entry in space.entries:
            if entry.is_findable:
                self.forget(entry.key, "lost")
        self.forgotten = [entry for entry in self.forgotten if entry.space is not space]

    def evict_for(self, num_bytes: int, drives: Collection[Drive]) -> Space | None:
        """Forget the policy's victim on one of these drives, and the neighbours that a record of `num_bytes` needs.

        Returns its space. None, and nothing is forgotten, if entries in use leave no place.
        """
        for key in self._order.victims():
            entry = self._entries[key]
            if entry.is_idle and entry.space.drive in drives:
                victims = entry.space.victims_around(entry, entry.space.segment.slots_for(num_bytes))
                if victims is not None:
                    break
        else:
            return None
        for victim in victims:
            self.forget(victim.key, "evicted")
        self.num_evicted += len(victims)
        return entry.space

    def check(self, entries: Iterator[Entry]) -> None:
        """Raise RuntimeError unless the findable ones of the entries are in here, and known to the policy."""
        findable = {entry.run.key: entry for entry in entries if entry.is_findable}
        if findable != self._entries or set(self._order.victims()) != set(self._entries):
            raise RuntimeError(f"{len(findable)} records are findable, {len(self._entries)} in the index")
        if sum(entry.run.num_bytes for entry in findable.values()) != self.num_bytes:
            raise RuntimeError(f"records are not of {self.num_bytes} bytes")

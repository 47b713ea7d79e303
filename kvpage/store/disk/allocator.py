"""Allocator: finds a place on the disks for the next record, and evicts others for it.

    free slots in the directory with most ─► a longer segment ─► a new one ─► slots that the policy evicts ─► None
    and, where a drive fails on the way, the same without it

A free run's header covers the whole run. A run that is cut from it gets a header of its own before it is written to,
after the header of the remainder. Callers hold the tier's `changes`. `lock` is taken here, and never held while the
disk is waited for.
"""

import threading
from collections.abc import Iterator, Sequence

from kvpage.store.disk.directory import Directory
from kvpage.store.disk.drive import DriveError
from kvpage.store.disk.index import Index
from kvpage.store.disk.segment import Run
from kvpage.store.disk.space import Entry, Space


class Allocator:
    """Gives out and takes back the slots of all directories."""

    def __init__(self, directories: list[Directory], index: Index, lock: threading.Lock) -> None:
        self.directories = directories
        self.lock = lock
        self._index = index

    @property
    def entries(self) -> Iterator[Entry]:
        return (entry for directory in self.directories for entry in directory.entries)

    def allocate(self, num_bytes: int) -> Entry | None:
        """Return an entry for a record of `num_bytes`, with one user and without a record.

        None if entries in use leave no place. Raises DriveError if only trouble is in the way.
        """
        left, trouble = self._present_directories(), None
        while left:
            group = [directory for directory in left if not directory.drive.is_paused] or left
            try:
                entry = self._in_free_slots(group, num_bytes) or self._by_evicting(group, num_bytes)
                if entry is None:
                    left = [directory for directory in left if directory not in group]
                elif not self._is_lost(entry):
                    return self._cut(entry)
            except DriveError as error:
                trouble = error
                left = [directory for directory in left if directory.drive is not error.drive]
        if trouble is not None:
            raise trouble
        return None

    def mark_forgotten(self, gives_back: bool = False) -> None:
        """Mark forgotten entries free. An entry stays forgotten and in use until the disk takes its header.

        gives_back: whether the space of those without readers goes back to the file system.
        """
        with self.lock:
            forgotten, self._index.forgotten = self._index.forgotten, []
        for entry in forgotten:
            try:
                entry.space.drive.run(mark_free, entry)
            except DriveError:
                with self.lock:
                    self._index.forgotten.append(entry)
                continue
            if gives_back and entry.num_users == 0:
                entry.space.segment.give_back(entry.run)
            with self.lock:
                entry.is_marked_free = True
                if entry.is_over:
                    entry.space.release(entry)

    def published(self, entry: Entry) -> None:
        """Tell other processes that read of a record that can be found now."""
        for directory in self.directories:
            if directory.drive is entry.space.drive:
                directory.published(entry)

    def let_go(self, entry: Entry) -> None:
        """Take away one user."""
        with self.lock:
            entry.num_users -= 1
            if entry.is_over:
                entry.space.release(entry)

    def sync(self, directories: Sequence[Directory]) -> None:
        """Sync directories whose drives were entered, and leave the drives. Raises DriveError."""
        try:
            for directory in directories:
                directory.drive.run(directory.sync)
        finally:
            with self.lock:
                for directory in directories:
                    directory.drive.leave()

    # --- places ---

    def _in_free_slots(self, group: Sequence[Directory], num_bytes: int) -> Entry | None:
        for directory in sorted(group, key=lambda owner: -owner.num_free_bytes) if len(group) > 1 else group:
            entry = self._in_spaces(directory.spaces, num_bytes)
            if entry is None:
                entry = self._at_end(directory, num_bytes)
            if entry is not None:
                return entry
        return None

    def _by_evicting(self, group: Sequence[Directory], num_bytes: int) -> Entry | None:
        with self.lock:
            space = self._index.evict_for(num_bytes, [directory.drive for directory in group])
        if space is None:
            return None
        self.mark_forgotten()
        entry = self._in_spaces([space], num_bytes)
        if entry is None:
            directory = next(directory for directory in group if directory.drive is space.drive)
            entry = self._at_end(directory, num_bytes)
        if entry is None:
            raise DriveError(space.drive, "evicted records left no place")
        return entry

    def _in_spaces(self, spaces: Sequence[Space], num_bytes: int) -> Entry | None:
        with self.lock:
            for space in spaces:
                entry = space.allocate(space.segment.slots_for(num_bytes))
                if entry is not None:
                    entry.num_users += 1
                    return entry
        return None

    def _at_end(self, directory: Directory, num_bytes: int) -> Entry | None:
        """Return an entry in slots that are added. If the disk refuses them, the present ones must do."""
        try:
            space = directory.grow(num_bytes)
        except OSError:
            directory.drive.fill()
            return None
        if space is None:
            return None
        with self.lock:
            space.extend()
        return self._in_spaces([space], num_bytes)

    def _cut(self, entry: Entry) -> Entry:
        drive, segment = entry.space.drive, entry.space.segment
        with self.lock:
            remainder = entry.space.remainder(entry)
        try:
            if segment.has_holes:
                drive.run(segment.reserve, entry.run)
            for run in (remainder, entry.run) if remainder else (entry.run,):
                drive.run(segment.cover, run)
        except DriveError:
            self.let_go(entry)
            raise
        return entry

    # --- directories and files that are deleted from outside ---

    def _present_directories(self) -> list[Directory]:
        """Return the directories that are there. Deleted ones are made anew, without their records."""
        present = []
        for at, directory in enumerate(self.directories):
            try:
                if directory.is_deleted():
                    self.directories[at] = self._renewed(directory)
                present.append(self.directories[at])
            except (OSError, ValueError):
                directory.drive.fail()
        return present

    def _renewed(self, directory: Directory) -> Directory:
        with self.lock:
            for space in directory.spaces:
                self._index.lose(space)
        renewed = directory.successor()
        renewed.open()
        with self.lock:
            self._index.find(renewed.entries)
            directory.drive.retire(directory.close)
        return renewed

    def _is_lost(self, entry: Entry) -> bool:
        """Return whether the entry's segment was deleted. If so, all that is in it is forgotten."""
        space = entry.space
        try:
            if not space.segment.is_deleted():
                return False
        except OSError as error:
            self.let_go(entry)
            raise DriveError(space.drive, str(error)) from error
        self.let_go(entry)
        with self.lock:
            self._index.lose(space)
            for directory in self.directories:
                directory.drop(space)
        return True


def mark_free(entry: Entry) -> None:
    """Write a free header over the whole slot, or over the header alone while the record is being read."""
    run = Run(entry.run.slot, entry.run.num_slots)
    if entry.num_users == 0:
        entry.space.segment.cover(run)
    else:
        entry.space.segment.mark(run)

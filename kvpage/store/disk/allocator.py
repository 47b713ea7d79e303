"""Allocator: where on the disks the next record goes, and what has to go for it.

    free room in the directory that has most ─► a new segment ─► what the policy evicts ─► None
    and, where a drive fails on the way, the same without it

A free run's header reaches to its end: a run that is cut from it gets one of its own before it is written to, after
the one of what is left behind it. Whoever calls holds the tier's `changes`; `lock` is taken here, and not held while
the disk is waited for.
"""

import functools
import threading
from collections.abc import Callable, Iterator, Sequence

from kvpage.store.disk.directory import Directory
from kvpage.store.disk.index import Index
from kvpage.store.disk.segment import Run
from kvpage.store.disk.space import Drive, Entry, Space
from kvpage.store.tiers.tier import TierError


class DriveError(TierError):
    """A drive is in trouble."""

    def __init__(self, drive: Drive, message: str) -> None:
        super().__init__(f"{drive.path}: {message}")
        self.drive = drive


class Allocator:
    """The directories. num_errors: of the operating system, so far."""

    def __init__(self, directories: list[Directory], index: Index, lock: threading.Lock) -> None:
        self.directories = directories
        self.num_errors = 0
        self.lock = lock
        self._index = index

    @property
    def entries(self) -> Iterator[Entry]:
        return (entry for directory in self.directories for entry in directory.entries)

    def place(self, num_bytes: int) -> Entry | None:
        """An entry for a record of so many bytes, with a user and without a record. None if what is in use leaves no
        room; DriveError if only trouble is in the way.
        """
        left, trouble = self._present_directories(), None
        while left:
            group = [directory for directory in left if not directory.drive.is_resting] or left
            try:
                entry = self._in_free_room(group, num_bytes) or self._by_evicting(group, num_bytes)
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

    def settle(self) -> None:
        """Marks free what was forgotten. What the disk does not take stays forgotten and in use until it does."""
        with self.lock:
            forgotten, self._index.forgotten = self._index.forgotten, []
        for entry in forgotten:
            try:
                self.on(entry.space.drive, functools.partial(mark_free, entry))
            except DriveError:
                with self.lock:
                    self._index.forgotten.append(entry)
                continue
            with self.lock:
                entry.is_marked_free = True
                entry.release_if_over()

    def let_go(self, entry: Entry) -> None:
        """One user less."""
        with self.lock:
            entry.num_users -= 1
            entry.release_if_over()

    def on(self, drive: Drive, call: Callable[[], object]) -> None:
        """DriveError for the operating system's errors."""
        try:
            call()
        except OSError as error:
            self._count_error(drive)
            raise DriveError(drive, error.strerror or str(error)) from error

    def sync(self, directories: Sequence[Directory]) -> None:
        """Of directories whose drives were entered; leaves them. DriveError."""
        try:
            for directory in directories:
                self.on(directory.drive, directory.sync)
        finally:
            with self.lock:
                for directory in directories:
                    directory.drive.leave()

    # --- room ---

    def _in_free_room(self, group: Sequence[Directory], num_bytes: int) -> Entry | None:
        for directory in sorted(group, key=lambda directory: -directory.room):
            entry = self._allocate(directory.spaces, num_bytes)
            if entry is None and self._grow(directory, num_bytes):
                entry = self._allocate(directory.spaces[-1:], num_bytes)
            if entry is not None:
                return entry
        return None

    def _by_evicting(self, group: Sequence[Directory], num_bytes: int) -> Entry | None:
        with self.lock:
            space = self._index.evict_for(num_bytes, [directory.drive for directory in group])
        if space is None:
            return None
        self.settle()
        entry = self._allocate([space], num_bytes)
        if entry is None:
            raise DriveError(space.drive, "evicted records could not be marked free")
        return entry

    def _allocate(self, spaces: Sequence[Space], num_bytes: int) -> Entry | None:
        with self.lock:
            for space in spaces:
                entry = space.allocate(space.segment.slots_for(num_bytes))
                if entry is not None:
                    entry.num_users += 1
                    return entry
        return None

    def _grow(self, directory: Directory, num_bytes: int) -> bool:
        """Whether there is a new segment. If it cannot be made, what is there has to do."""
        try:
            return directory.grow(num_bytes) is not None
        except OSError:
            self._count_error()
            return False

    def _cut(self, entry: Entry) -> Entry:
        with self.lock:
            rest = entry.space.rest_behind(entry)
        try:
            for run in (rest, entry.run) if rest else (entry.run,):
                self.on(entry.space.drive, functools.partial(entry.space.segment.cover, run))
        except DriveError:
            self.let_go(entry)
            raise
        return entry

    def _count_error(self, drive: Drive | None = None) -> None:
        with self.lock:
            self.num_errors += 1
        if drive is not None:
            drive.rest()

    # --- directories and files that somebody deletes ---

    def _present_directories(self) -> list[Directory]:
        """Those that are there; deleted ones are made anew, and without their records."""
        present = []
        for at, directory in enumerate(self.directories):
            try:
                if directory.is_deleted():
                    self.directories[at] = self._renewed(directory)
                present.append(self.directories[at])
            except (OSError, ValueError):
                self._count_error(directory.drive)
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
        """Whether its segment was deleted: then all that is in it is forgotten."""
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
    """The whole slot, unless it is being read."""
    run = Run(entry.run.slot, entry.run.num_slots)
    if entry.num_users == 0:
        entry.space.segment.cover(run)
    else:
        entry.space.segment.mark(run)

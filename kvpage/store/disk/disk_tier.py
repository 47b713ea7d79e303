"""DiskTier: records in segment files, in one directory or in several (on several drives).

    keys ─► Index ─► Entry ─► Space (who has which slots) ─► Segment (a file)        a Directory has several of them
         Allocator ──┘ └─► DiskReader, DiskWriter

The index is kept in memory and found again by walking the segments' headers; there is no file of it to lose. A crash
between writing a record and freeing the old one of its key leaves two. The one of the higher generation counts. Files
are 0600, new directories 0700. Nothing is mapped into memory: there a read error would be a signal.

Two locks. `_lock` guards the memory and is never held while the disk is waited for, so that looking up is quick
whatever the disk does. `_changes` is held by calls that write headers; `_lock` is taken within it.
"""

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from kvpage.store.disk.allocator import Allocator
from kvpage.store.disk.directory import MIN_SEGMENT_SLOTS, Directory, check_space
from kvpage.store.disk.drive import DriveError
from kvpage.store.disk.index import Index
from kvpage.store.disk.reader_writer import STAGING_BYTES, Buffers, DiskReader, DiskWriter
from kvpage.store.disk.segment import EndOfFile, Run
from kvpage.store.disk.space import Entry
from kvpage.store.tiers.policy import VictimOrder
from kvpage.store.tiers.tier import Key, Note, Reader, RecordInfo, Tier, TierError, TierStats, Writer

SLOT_BYTES = 4096
SEGMENT_BYTES = 1 << 30
RETRY_SECONDS = 1.0
Result = TypeVar("Result")


class DiskTier(Tier):
    """Records in files of one or more directories, which are made if they are not there.

    `remove` and `clear` write to the disk at once, and would survive a loss of power only after flush(sync=True). They
    give back the records' space, but for 4 KiB of each, where the file system can; evicted ones are written over. An
    error of the disk is a TierError or a miss, and leaves every record as it was. A timeout bounds the wait for other
    calls: no system call limits the time that a disk takes. In a forked child the tier is closed.

    capacity: bytes that all segments together may grow to; None for the segments that are there: then no
    file or directory is made or deleted. policy: one of POLICIES; after opening, records are in the order of
    writing, and `infos` reports the time of writing until they are used. segment_bytes: of a file; no record can be
    larger.
    retry_seconds: after an error of a directory the others are preferred for this long, and it does not grow.

    Raises ValueError for a directory that is open in another process or of another version, and for less space than the
    capacity; OSError for a directory that cannot be made or read.
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        capacity: int | None,
        policy: str = "lru",
        segment_bytes: int = SEGMENT_BYTES,
        name: str = "disk",
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        places = [Path(path).absolute() for path in paths]
        if not places or len(set(places)) != len(places):
            raise ValueError(f"paths must be at least one, each once, got {[str(path) for path in paths]}")
        if capacity is not None and (isinstance(capacity, bool) or not isinstance(capacity, int)):
            raise ValueError(f"capacity must be an integer or None, got {capacity!r}")
        least = MIN_SEGMENT_SLOTS * SLOT_BYTES
        if segment_bytes < least or (capacity is not None and capacity // len(places) < least):
            raise ValueError(
                f"capacity and segment_bytes must be at least {least} bytes a directory, "
                f"got {capacity} and {segment_bytes}"
            )
        self.name = name
        self.buffers = Buffers(STAGING_BYTES)
        self._capacity = capacity
        self._is_closed = False
        self._lock, self._changes = threading.Lock(), threading.Lock()
        self._index = Index(VictimOrder(policy))
        share = None if capacity is None else capacity // len(places)
        directories = [Directory(path, share, SLOT_BYTES, segment_bytes, retry_seconds) for path in places]
        self._allocator = Allocator(directories, self._index, self._lock)
        self._open_directories()
        _open_tiers.add(self)

    def watch(self, note: Note | None) -> None:
        with self._lock:
            self._index.watch(note)

    def contains(self, keys: Sequence[Key], timeout: float | None = None) -> list[bool]:
        with self._lock:
            self._check_open()
            return self._index.has(keys)

    def touch(self, keys: Sequence[Key], timeout: float | None = None) -> list[bool]:
        with self._lock:
            self._check_open()
            return [self._index.touch(key) is not None for key in keys]

    def open(self, keys: Sequence[Key], timeout: float | None = None) -> list[Reader | None]:
        with self._lock:
            self._check_open()
            entries = [self._index.use(key) for key in keys]
        return [None if entry is None else self._reader(entry) for entry in entries]

    def create(self, key: Key, num_bytes: int) -> Writer | None:
        """Return a writer; None if entries in use leave no place. Raises TierError if only trouble is in the way."""
        if len(key) != 32 or num_bytes < 1:
            raise ValueError(f"key must be 32 bytes, num_bytes positive, got {len(key)} and {num_bytes}")
        buffer = self.buffers.take()
        with self._changing():
            self._allocator.mark_forgotten()
            entry = self._allocator.allocate(num_bytes)
            if entry is None:
                self.buffers.give(buffer)
                return None
            with self._lock:
                generation = self._index.next_generation()
            slot, num_slots, *_ = entry.run
            entry.run = Run(slot, num_slots, generation, num_bytes, time.time(), bytes(key))
        return DiskWriter(self, entry, buffer)

    def commit(self, writers: Sequence[Writer], timeout: float | None = None) -> list[bool]:
        """Return False for records that the disk did not take, if it took others. Raises TierError if it took none."""
        open_writers = [
            writer for writer in writers if isinstance(writer, DiskWriter) and writer.owner is self and writer.is_open
        ]
        if len(open_writers) != len(writers) or len(set(map(id, open_writers))) != len(open_writers):
            raise ValueError("writers must be this tier's, not closed, each given once")
        for writer in open_writers:
            writer.check_whole()
        done, trouble = [], None
        deadline = None if timeout is None else time.monotonic() + timeout
        for writer in open_writers:
            try:
                self._commit(writer, deadline)
                done.append(True)
            except TierError as error:
                trouble = error
                done.append(False)
        if trouble is not None and not any(done):
            raise trouble
        return done

    def remove(self, keys: Sequence[Key], timeout: float | None = None) -> int:
        with self._changing(None if timeout is None else time.monotonic() + timeout):
            with self._lock:
                count = sum([self._index.forget(key, "removed") for key in keys])
            self._allocator.mark_forgotten(gives_back=True)
        return count

    def infos(self) -> Iterator[RecordInfo]:
        with self._lock:
            self._check_open()
            return iter(self._index.infos())

    def clear(self) -> None:
        with self._lock:
            keys = self._index.keys
        self.remove(keys)

    def flush(self, sync: bool = False) -> None:
        """Mark removed records free; with `sync`, wait until the disk has everything.

        Raises TierError, also if a record could not be removed.
        """
        with self._changing():
            self._allocator.mark_forgotten()
            with self._lock:
                if sync and self._index.forgotten:
                    raise TierError(f"{self.name}: {len(self._index.forgotten)} records could not be removed")
                directories = list(self._allocator.directories) if sync else []
                for directory in directories:
                    directory.drive.enter()
        self._allocator.sync(directories)

    def stats(self) -> TierStats:
        with self._lock:
            self._check_open()
            index, directories = self._index, self._allocator.directories
            num_corrupted = index.num_corrupted + sum(directory.num_damaged for directory in directories)
            capacity = self._capacity
            if capacity is None:
                capacity = sum(directory.max_bytes for directory in directories)
            num_errors = sum(directory.drive.num_errors for directory in directories)
            counts = index.num_evicted, num_corrupted, num_errors
            return TierStats(self.name, len(index), index.num_bytes, capacity, *counts)

    def close(self) -> None:
        """Close the files. Open readers and writers raise TierError from then on.

        A directory with a call at its files is given back when that call ends.
        """
        with self._changes:
            if self._is_closed:
                return
            _open_tiers.discard(self)
            self._allocator.mark_forgotten()
            with self._lock:
                self._is_closed = True
                for directory in self._allocator.directories:
                    directory.drive.retire(directory.close)

    def check(self) -> None:
        """Raise RuntimeError unless slots, headers, index and policy agree, and files are within the capacity."""
        with self._changes, self._lock:
            self._index.check(self._allocator.entries)
            for directory in self._allocator.directories:
                for space in directory.spaces:
                    space.check()
            num_bytes = sum(directory.max_bytes for directory in self._allocator.directories)
            if self._capacity is not None and num_bytes > self._capacity:
                raise RuntimeError(f"segments of {num_bytes} bytes exceed the capacity of {self._capacity}")

    # --- for readers and writers ---

    def on_disk(self, entry: Entry, call: Callable[..., Result], *args: object) -> Result:
        """Return the result of a call at the entry's file. Raises TierError."""
        drive = entry.space.drive
        with self._lock:
            self._check_open()
            drive.enter()
        try:
            return drive.run(call, *args)
        except DriveError as error:
            if isinstance(error.__cause__, EndOfFile):  # it was cut off: no use in trying again
                self._drop(entry)
            raise
        finally:
            with self._lock:
                drive.leave()

    def let_go(self, entry: Entry) -> None:
        self._allocator.let_go(entry)

    def give_up(self, entry: Entry) -> None:
        with self._lock:
            if not entry.is_marked_free and not entry.space.is_lost:  # its header may have been written
                self._index.forgotten.append(entry)
        self._allocator.let_go(entry)

    # --- inside ---

    def _open_directories(self) -> None:
        directories = self._allocator.directories
        try:
            for directory in directories:
                directory.open()
            self._index.find(self._allocator.entries)
            check_space(directories)
            self._allocator.mark_forgotten()
        except BaseException:
            for directory in directories:
                directory.close()
            raise

    @contextmanager
    def _changing(self, deadline: float | None = None) -> Iterator[None]:
        if not self._changes.acquire(timeout=-1 if deadline is None else max(deadline - time.monotonic(), 0.0)):
            raise TierError(f"{self.name}: other calls took too long")
        try:
            self._check_open()
            yield
        finally:
            self._changes.release()

    def _check_open(self) -> None:
        if self._is_closed:
            raise TierError(f"{self.name} is closed")

    def _commit(self, writer: DiskWriter, deadline: float | None) -> None:
        writer.finish()
        entry = writer.entry
        with self._changing(deadline):
            if entry.space.is_lost:
                raise TierError(f"{self.name}: {entry.space.segment.path} was deleted")
            entry.is_marked_free = False  # whatever becomes of the next line
            entry.space.drive.run(entry.space.segment.mark, entry.run)
            with self._lock:
                self._index.add(entry)
            self._allocator.published(entry)
            self._allocator.mark_forgotten()
        writer.leave()

    def _reader(self, entry: Entry) -> Reader | None:
        """Return None if the disk fails, or if another process has written over the record's header."""
        reader = DiskReader(self, entry)
        try:
            if reader.is_there():
                return reader
            self._drop(entry)
        except TierError:  # a miss; another time it may be there
            pass
        reader.close()
        return None

    def _drop(self, entry: Entry) -> None:
        with self._lock:
            self._index.drop(entry)

    def close_in_child(self) -> None:
        """Close after a fork: the files are the parent's, and locks may be held by threads that are not here."""
        self._lock, self._changes = threading.Lock(), threading.Lock()
        self._allocator.lock = self._lock
        self._is_closed = True
        for directory in self._allocator.directories:
            directory.close()


# A hook for forks can never be removed, so one hook serves all tiers.
_open_tiers: "weakref.WeakSet[DiskTier]" = weakref.WeakSet()


def _close_in_child() -> None:
    for tier in list(_open_tiers):
        tier.close_in_child()


os.register_at_fork(after_in_child=_close_in_child)

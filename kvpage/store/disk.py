"""DiskTier: records in segment files, in one directory or in several (on several drives).

    keys ─► index ─► Entry ─► Space (who has which slots) ─► Segment (a file)        a Directory has several of them
                       └► DiskReader, DiskWriter

What lies where is kept in memory and found again by walking the segments' headers; there is no index to lose. Of two
records of one key, as a crash between writing the new and freeing the old may leave, the one of the higher generation
counts. Files are 0600, new directories 0700. Nothing is mapped into memory: there a read error would be a signal.

Two locks. `_lock` guards what is in memory and is never held while the disk is waited for, so that looking up is quick
whatever the disk does. `_changes` is held by whoever writes headers, which `_lock` is taken within.
"""

import functools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvpage.store.disk_directory import MIN_SEGMENT_SLOTS, Directory
from kvpage.store.disk_io import STAGING_BYTES, Buffers, DiskReader, DiskWriter
from kvpage.store.disk_segment import EndOfFile, Run
from kvpage.store.disk_space import Drive, Entry, Space
from kvpage.store.policy import make_policy
from kvpage.store.tier import Key, Reader, RecordInfo, Tier, TierError, TierStats, Writer

SLOT_BYTES = 4096
SEGMENT_BYTES = 1 << 30
RETRY_SECONDS = 1.0


class DiskTier(Tier):
    """paths: directories, made if they are not there; records are spread over them. capacity: bytes of all segments
    together, which are preallocated one by one; None for the segments that are there: then no file or directory is made
    or deleted. policy: lru, lfu, fifo; after opening, records are in the order in which they were written, and that is
    what `infos` tells of until they are used. segment_bytes: of a file; no record can be larger. retry_seconds: for so
    long after an error of a directory the others are preferred, and it grows no further.

    `remove` and `clear` write to the disk at once, and would survive a loss of power only after flush(sync=True). An
    error of the disk is a TierError or a miss, and leaves every record as it was. A timeout is that of waiting for
    other calls: no system call tells the disk how long it may take. In a forked child the tier is closed.

    Raises ValueError for a directory that another process has open or that another version has written, and if there is
    less space than capacity; OSError for a directory that cannot be made or read.
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
        least = MIN_SEGMENT_SLOTS * SLOT_BYTES
        if segment_bytes < least or (capacity is not None and capacity // len(places) < least):
            raise ValueError(
                f"capacity and segment_bytes must be at least {least} bytes a directory, "
                f"got {capacity} and {segment_bytes}"
            )
        self.name = name
        self.buffers = Buffers(STAGING_BYTES)
        self._capacity = capacity
        self._policy = make_policy(policy)
        self._index: dict[Key, Entry] = {}
        self._forgotten: list[Entry] = []  # whose headers still are to be marked free
        self._generation = self._num_bytes = self._num_evicted = self._num_corrupted = self._num_errors = 0
        self._lock, self._changes = threading.Lock(), threading.Lock()
        self._is_closed = False
        share = None if capacity is None else capacity // len(places)
        self._directories = [Directory(path, share, SLOT_BYTES, segment_bytes, retry_seconds) for path in places]
        self._open_directories()
        os.register_at_fork(after_in_child=functools.partial(_close_in_child, weakref.ref(self)))

    def contains(self, keys: Sequence[Key], timeout: float | None = None) -> list[bool]:
        with self._lock:
            self._check_open()
            return [key in self._index for key in keys]

    def open(self, keys: Sequence[Key], timeout: float | None = None) -> list[Reader | None]:
        with self._lock:
            self._check_open()
            entries = [self._use(key) for key in keys]
        return [None if entry is None else self._reader(entry) for entry in entries]

    def create(self, key: Key, num_bytes: int) -> Writer | None:
        """TierError if the disk is in trouble; None also if what would have to go is in use."""
        if len(key) != 32 or num_bytes < 1:
            raise ValueError(f"key must be 32 bytes, num_bytes positive, got {len(key)} and {num_bytes}")
        with self._changing():
            self._settle()
            entry = self._place(num_bytes)
            if entry is None:
                return None
            with self._lock:
                self._generation += 1
                generation = self._generation
            entry.run = entry.run._replace(
                generation=generation, num_bytes=num_bytes, written=time.time(), key=bytes(key)
            )
            return DiskWriter(self, entry, entry.run.key or key)

    def commit(self, writers: Sequence[Writer], timeout: float | None = None) -> list[bool]:
        """False for those that the disk did not take, if it took others; TierError if it took none."""
        mine = [writer for writer in writers if isinstance(writer, DiskWriter) and writer.is_open]
        if len(mine) != len(writers) or len(set(map(id, mine))) != len(mine):
            raise ValueError("writers must be this tier's, not closed, each given once")
        done, trouble = [], None
        for writer in mine:
            try:
                self._commit(writer, timeout)
                done.append(True)
            except TierError as error:
                trouble = error
                done.append(False)
        if trouble is not None and not any(done):
            raise trouble
        return done

    def remove(self, keys: Sequence[Key], timeout: float | None = None) -> int:
        with self._changing(timeout):
            with self._lock:
                count = sum([self._forget(key) for key in keys])
            self._settle()
        return count

    def infos(self) -> Iterator[RecordInfo]:
        with self._lock:
            self._check_open()
            return iter([RecordInfo(key, one.run.num_bytes, one.last_used) for key, one in self._index.items()])

    def clear(self) -> None:
        with self._changing():
            with self._lock:
                for key in list(self._index):
                    self._forget(key)
            self._settle()

    def flush(self, sync: bool = False) -> None:
        """The operating system has everything already; with `sync` the disk has it, too."""
        with self._changing():
            self._settle()
            with self._lock:
                if sync and self._forgotten:
                    raise TierError(f"{self.name}: {len(self._forgotten)} records could not be removed")
                directories = list(self._directories) if sync else []
                for directory in directories:
                    directory.drive.enter()
        try:
            for directory in directories:
                self._on(directory.drive, directory.sync)
        finally:
            with self._lock:
                for directory in directories:
                    directory.drive.leave()

    def stats(self) -> TierStats:
        with self._lock:
            self._check_open()
            damaged = sum(directory.num_damaged for directory in self._directories)
            capacity = self._capacity
            if capacity is None:
                capacity = sum(directory.num_bytes for directory in self._directories)
            return TierStats(
                self.name,
                len(self._index),
                self._num_bytes,
                capacity,
                self._num_evicted,
                self._num_corrupted + damaged,
                self._num_errors,
            )

    def close(self) -> None:
        """Calls that are reading or writing a file end first; open readers and writers raise TierError from then on."""
        with self._changes:
            if self._is_closed:
                return
            self._settle()
            with self._lock:
                self._is_closed = True
                self._index.clear()
                for directory in self._directories:
                    directory.drive.retire(directory.close)

    def check(self) -> None:
        """RuntimeError unless slots, headers, index and policy tell the same, and files are within the capacity."""
        with self._changes, self._lock:
            entries = [entry for directory in self._directories for entry in directory.entries]
            for directory in self._directories:
                for space in directory.spaces:
                    space.check()
            findable = {entry.run.key: entry for entry in entries if entry.is_findable}
            if findable != self._index or set(self._policy.victims()) != set(self._index):
                raise RuntimeError(f"{len(findable)} records are findable, {len(self._index)} in the index")
            if sum(entry.run.num_bytes for entry in findable.values()) != self._num_bytes:
                raise RuntimeError(f"records are not of {self._num_bytes} bytes")
            num_bytes = sum(directory.num_bytes for directory in self._directories)
            if self._capacity is not None and num_bytes > self._capacity:
                raise RuntimeError(f"segments of {num_bytes} bytes exceed the capacity of {self._capacity}")

    # --- opening ---

    def _open_directories(self) -> None:
        try:
            for directory in self._directories:
                directory.open()
            for entry in sorted(self._entries(), key=lambda entry: entry.run.generation):
                self._find(entry)
            self._check_space()
            self._settle()
        except BaseException:
            for directory in self._directories:
                directory.close()
            raise

    def _entries(self) -> Iterator[Entry]:
        return (entry for directory in self._directories for entry in directory.entries)

    def _find(self, entry: Entry) -> None:
        """A record that a header tells of: a newer one of the key than those before."""
        assert entry.run.key is not None
        self._forget(entry.run.key)
        self._add(entry.run.key, entry)
        self._generation = max(self._generation, entry.run.generation)

    def _check_space(self) -> None:
        lacking: dict[int, int] = {}  # by drive
        for directory in self._directories:
            status, device = os.statvfs(directory.path), os.stat(directory.path).st_dev
            lacking[device] = lacking.get(device, 0) + directory.num_lacking
            if lacking[device] > status.f_bavail * status.f_frsize:
                raise ValueError(
                    f"capacity must fit on the disk: {directory.path} has {status.f_bavail * status.f_frsize} bytes "
                    f"free, {lacking[device]} more are needed"
                )

    # --- inside, with `_lock` held ---

    def _check_open(self) -> None:
        if self._is_closed:
            raise TierError(f"{self.name} is closed")

    def _use(self, key: Key) -> Entry | None:
        entry = self._index.get(key)
        if entry is not None:
            self._policy.use(key)
            entry.last_used = time.time()
            entry.num_users += 1
        return entry

    def _add(self, key: Key, entry: Entry) -> None:
        entry.is_findable = True
        self._index[key] = entry
        self._policy.add(key)
        self._num_bytes += entry.run.num_bytes

    def _forget(self, key: Key) -> bool:
        """Whether there was one. It is not findable now; `_settle` writes it down."""
        entry = self._index.pop(key, None)
        if entry is None:
            return False
        self._policy.remove(key)
        self._num_bytes -= entry.run.num_bytes
        entry.is_findable = False
        self._forgotten.append(entry)
        return True

    def _victims(self, drives: Sequence[Drive], num_bytes: int) -> list[Entry] | None:
        """What goes for a record: the first by the policy that nobody reads, and its neighbours as far as necessary."""
        for key in self._policy.victims():
            entry = self._index[key]
            if entry.is_idle and entry.space.drive in drives:
                going = entry.space.room_around(entry, entry.space.segment.slots_for(num_bytes))
                if going is not None:
                    return going
        return None

    # --- inside, with `_changes` held ---

    @contextmanager
    def _changing(self, timeout: float | None = None) -> Iterator[None]:
        if not self._changes.acquire(timeout=-1 if timeout is None else max(timeout, 0.0)):
            raise TierError(f"{self.name} was busy for {timeout} seconds")
        try:
            self._check_open()
            yield
        finally:
            self._changes.release()

    def _settle(self) -> None:
        """Marks free what was forgotten. What the disk does not take stays forgotten and in use until it does."""
        with self._lock:
            forgotten, self._forgotten = self._forgotten, []
        for entry in forgotten:
            try:
                self._on(entry.space.drive, functools.partial(_mark_free, entry))
            except TierError:
                with self._lock:
                    self._forgotten.append(entry)
                continue
            with self._lock:
                entry.is_marked_free = True
                self._release_if_over(entry)

    def _place(self, num_bytes: int) -> Entry | None:
        """Room in one of the directories, those in trouble last. TierError if only trouble is in the way."""
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

    def _in_free_room(self, group: Sequence[Directory], num_bytes: int) -> Entry | None:
        """In the directory that has most of it, in a new segment if need be."""
        for directory in sorted(group, key=lambda directory: -directory.room):
            entry = self._allocate(directory.spaces, num_bytes)
            if entry is None and self._grow(directory, num_bytes):
                entry = self._allocate(directory.spaces[-1:], num_bytes)
            if entry is not None:
                return entry
        return None

    def _by_evicting(self, group: Sequence[Directory], num_bytes: int) -> Entry | None:
        """None, and nothing is evicted, if that would not be enough."""
        with self._lock:
            going = self._victims([directory.drive for directory in group], num_bytes)
            if going is None:
                return None
            for entry in going:
                self._forget(entry.run.key or b"")
            self._num_evicted += len(going)
        self._settle()
        found = self._allocate([going[0].space], num_bytes)
        if found is None:
            raise DriveError(going[0].space.drive, f"{self.name}: evicted records could not be marked free")
        return found

    def _allocate(self, spaces: Sequence[Space], num_bytes: int) -> Entry | None:
        with self._lock:
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
        """A free run's header reaches to its end: now that it is cut in two, each part gets its own."""
        with self._lock:
            rest = entry.space.rest_behind(entry)
        try:
            for run in (rest, entry.run) if rest else (entry.run,):
                self._on(entry.space.drive, functools.partial(entry.space.segment.cover, run))
        except TierError:
            self.let_go(entry)
            raise
        return entry

    def _commit(self, writer: DiskWriter, timeout: float | None) -> None:
        writer.finish()
        entry = writer.entry
        with self._changing(timeout):
            entry.is_marked_free = False  # whatever becomes of the next line
            try:
                self._on(entry.space.drive, functools.partial(entry.space.segment.mark, entry.run))
            except TierError:
                with self._lock:
                    self._forgotten.append(entry)
                raise
            with self._lock:
                self._forget(writer.key)
                self._add(writer.key, entry)
            self._settle()
        writer.close()

    # --- directories and files that somebody deletes ---

    def _present_directories(self) -> list[Directory]:
        """Those that are there; deleted ones are made anew, and without their records."""
        present = []
        for at, directory in enumerate(self._directories):
            try:
                if directory.is_deleted():
                    self._directories[at] = self._renewed(directory)
                present.append(self._directories[at])
            except (OSError, ValueError):
                self._count_error()
                directory.drive.rest()
        return present

    def _renewed(self, directory: Directory) -> Directory:
        for space in directory.spaces:
            self._lose(space)
        renewed = directory.successor()
        renewed.open()
        with self._lock:
            for entry in renewed.entries:
                self._find(entry)
            directory.drive.retire(directory.close)
        return renewed

    def _is_lost(self, entry: Entry) -> bool:
        """Whether its segment was deleted: then all that is in it is forgotten."""
        space = entry.space
        try:
            if not space.segment.is_deleted():
                return False
        except OSError as error:
            raise DriveError(space.drive, f"{self.name}: {error}") from error
        self._lose(space)
        self.let_go(entry)
        for directory in self._directories:
            directory.drop(space)
        return True

    def _lose(self, space: Space) -> None:
        with self._lock:
            for entry in space.entries:
                if entry.is_findable:
                    self._forget(entry.run.key or b"")
            self._forgotten = [entry for entry in self._forgotten if entry.space is not space]

    # --- for readers and writers ---

    def on_disk(self, entry: Entry, call: Callable[[], object]) -> None:
        drive = entry.space.drive
        with self._lock:
            self._check_open()
            drive.enter()
        try:
            self._on(drive, call)
        except DriveError as error:
            if isinstance(error.__cause__, EndOfFile):  # it was cut off: no use in trying again
                self._drop(entry)
            raise
        finally:
            with self._lock:
                drive.leave()

    def let_go(self, entry: Entry) -> None:
        with self._lock:
            entry.num_users -= 1
            self._release_if_over(entry)

    def _release_if_over(self, entry: Entry) -> None:
        if entry.is_over and not self._is_closed:
            entry.space.release(entry)

    def _reader(self, entry: Entry) -> Reader | None:
        """None if the disk fails, or if its header is not the record's any more: somebody has written to the file."""
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
        """A record that is none any more."""
        with self._lock:
            if entry.is_findable:
                self._num_corrupted += 1
                self._forget(entry.run.key or b"")

    def _on(self, drive: Drive, call: Callable[[], object]) -> None:
        """DriveError for the disk's trouble."""
        try:
            call()
        except OSError as error:
            self._count_error()
            drive.rest()
            raise DriveError(drive, f"{self.name}: {error.strerror or error}") from error

    def _count_error(self) -> None:
        with self._lock:
            self._num_errors += 1

    def close_in_child(self) -> None:
        """After a fork: the files are the parent's. Locks may have been held by threads that are not here."""
        self._lock, self._changes = threading.Lock(), threading.Lock()
        self._is_closed = True
        self._index = {}
        for directory in self._directories:
            directory.close()


class DriveError(TierError):
    """A drive is in trouble."""

    def __init__(self, drive: Drive, message: str) -> None:
        super().__init__(message)
        self.drive = drive


def _mark_free(entry: Entry) -> None:
    """The whole slot, unless it is being read."""
    run = Run(entry.run.slot, entry.run.num_slots)
    if entry.num_users == 0:
        entry.space.segment.cover(run)
    else:
        entry.space.segment.mark(run)


def _close_in_child(tier: "weakref.ref[DiskTier]") -> None:
    found = tier()
    if found is not None:
        found.close_in_child()

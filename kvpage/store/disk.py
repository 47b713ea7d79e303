"""DiskTier: records in segment files, in one directory or in several (on several drives).

    directory    lock           held while the tier is open: a second process is refused
                 0000.segment   made when it is needed, until the capacity is reached

What lies where is kept in memory and found again by walking the segments' headers; there is no index to lose. Of two
records of one key, as a crash between writing the new and freeing the old may leave, the one of the higher generation
counts. Files are 0600, new directories 0700. Nothing is mapped into memory: there a read error would be a signal.
"""

import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from kvpage.store.disk_segment import Run, Segment, as_tier_error, slots_for
from kvpage.store.extents import Extents
from kvpage.store.policy import make_policy
from kvpage.store.tier import Key, Reader, RecordInfo, Tier, TierError, TierStats, Writer

SLOT_BYTES = 4096
SEGMENT_BYTES = 1 << 30
MIN_SEGMENT_SLOTS = 16
SUFFIX = ".segment"
T = TypeVar("T")


class _Place:
    """A segment with what of it is free. Slot 0 is its header, so that extents begin at 1 of its slots."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.extents = Extents(segment.num_slots - 1)

    def take(self, run: Run) -> None:
        """A run that is in use already, as opening finds it."""
        self.extents.take(run.slot - 1, run.num_slots)


class _Entry:
    """A record's place. It is freed when nobody reads it and no key leads to it."""

    def __init__(self, place: _Place, run: Run) -> None:
        self.place, self.run = place, run
        self.num_readers = 0
        self.is_findable = False
        self.is_marked_free = False
        self.last_used = time.time()


class _DiskReader(Reader):
    def __init__(self, tier: "DiskTier", entry: _Entry) -> None:
        self._tier, self._entry = tier, entry
        self.num_bytes = entry.run.num_bytes
        self._buffer = bytearray()
        self._is_open = True

    def piece(self, begin: int, end: int) -> memoryview:
        if not 0 <= begin <= end <= self.num_bytes:
            raise ValueError(f"a piece must lie in [0, {self.num_bytes}], got [{begin}, {end}]")
        if len(self._buffer) < end - begin:
            self._buffer = bytearray(end - begin)
        view = memoryview(self._buffer)[: end - begin]
        self._tier._do(lambda: self._entry.place.segment.read(self._entry.run.slot, begin, view))
        return view

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._tier._let_go(self._entry)


class _DiskWriter(Writer):
    def __init__(self, tier: "DiskTier", entry: _Entry, key: Key) -> None:
        self._tier, self.entry = tier, entry
        self.key, self.num_bytes = key, entry.run.num_bytes
        self.is_open = True
        self._buffer = bytearray()
        self._begin = self._end = 0

    def piece(self, begin: int, end: int) -> memoryview:
        if not self._end == begin <= end <= self.num_bytes:
            raise ValueError(f"a piece must begin at {self._end} and end by {self.num_bytes}, got [{begin}, {end}]")
        self.write_out()
        if len(self._buffer) < end - begin:
            self._buffer = bytearray(end - begin)
        self._begin, self._end = begin, end
        return memoryview(self._buffer)[: end - begin]

    def write_out(self) -> None:
        """What is filled but not written."""
        view = memoryview(self._buffer)[: self._end - self._begin]
        self._tier._do(lambda: self.entry.place.segment.write(self.entry.run.slot, self._begin, view))
        self._begin = self._end

    @property
    def is_whole(self) -> bool:
        return self._end == self.num_bytes

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self._tier._give_up(self.entry)


class DiskTier(Tier):
    """paths: directories, made if they are not there. capacity: bytes of all segments together; they are preallocated
    one by one. policy: lru, lfu, fifo; after opening, records are in the order in which they were written.
    segment_bytes: of a file; no record can be larger.

    `remove` and `clear` write to the disk at once, and would survive a loss of power only after flush(sync=True).

    Raises ValueError for a directory that another process has open, and if there is less space than capacity; OSError
    for a directory that cannot be made or read.
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        capacity: int,
        policy: str = "lru",
        segment_bytes: int = SEGMENT_BYTES,
        name: str = "disk",
    ) -> None:
        self.name = name
        self._paths = [Path(path) for path in paths]
        if not self._paths or len(set(self._paths)) != len(self._paths):
            raise ValueError(f"paths must be at least one, each once, got {[str(path) for path in paths]}")
        share = capacity // len(self._paths)
        self._segment_slots = min(segment_bytes, share) // SLOT_BYTES
        if self._segment_slots < MIN_SEGMENT_SLOTS:
            raise ValueError(
                f"capacity and segment_bytes must be at least {MIN_SEGMENT_SLOTS * SLOT_BYTES} bytes a directory, "
                f"got {capacity} and {segment_bytes}"
            )
        self._max_segments = share // (self._segment_slots * SLOT_BYTES)
        self._capacity = capacity
        self._policy = make_policy(policy)
        self._places: dict[Path, list[_Place]] = {path: [] for path in self._paths}
        self._entries: dict[Key, _Entry] = {}
        self._generation = self._num_bytes = self._num_evicted = self._num_errors = 0
        self._unmarked: list[_Entry] = []  # to be freed as soon as the disk takes their headers
        self._locks: list[int] = []
        self._lock = threading.Lock()
        self._is_closed = False
        try:
            for path in self._paths:
                self._locks.append(_lock(path))
                self._find(path)
            self._take_over()
            self._check_space()
        except BaseException:
            self._close_files()
            raise

    def contains(self, keys: Sequence[Key], timeout: float | None = None) -> list[bool]:
        with self._lock:
            self._check_open()
            return [key in self._entries for key in keys]

    def open(self, keys: Sequence[Key], timeout: float | None = None) -> list[Reader | None]:
        with self._lock:
            self._check_open()
            return [self._open(key) for key in keys]

    def create(self, key: Key, num_bytes: int) -> Writer | None:
        with self._lock:
            self._check_open()
            found = self._make_room(slots_for(num_bytes, SLOT_BYTES))
            if found is None:
                return None
            place, begin = found
            self._generation += 1
            run = Run(begin + 1, slots_for(num_bytes, SLOT_BYTES), self._generation, num_bytes, key)
            return _DiskWriter(self, _Entry(place, run), key)

    def commit(self, writers: Sequence[Writer], timeout: float | None = None) -> list[bool]:
        return [self._commit(writer) for writer in writers]

    def remove(self, keys: Sequence[Key], timeout: float | None = None) -> int:
        with self._lock:
            self._check_open()
            return sum([self._forget(key) for key in keys])

    def infos(self) -> Iterator[RecordInfo]:
        with self._lock:
            self._check_open()
            return iter([RecordInfo(key, one.run.num_bytes, one.last_used) for key, one in self._entries.items()])

    def clear(self) -> None:
        with self._lock:
            self._check_open()
            for key in list(self._entries):
                self._forget(key)

    def flush(self, sync: bool = False) -> None:
        """The operating system has everything already; with `sync` the disk has it, too."""
        with self._lock:
            self._check_open()
            segments = [place.segment for places in self._places.values() for place in places]
        for segment in segments if sync else []:
            self._do(segment.sync)

    def stats(self) -> TierStats:
        with self._lock:
            return TierStats(
                self.name, len(self._entries), self._num_bytes, self._capacity, self._num_evicted, 0, self._num_errors
            )

    def close(self) -> None:
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._entries.clear()
                self._close_files()

    def check(self) -> None:
        """RuntimeError if places overlap or are lost, or files are larger than the capacity."""
        with self._lock:
            for places in self._places.values():
                for place in places:
                    place.extents.check()
            num_bytes = sum(
                place.segment.num_slots * SLOT_BYTES for places in self._places.values() for place in places
            )
            if num_bytes > self._capacity:
                raise RuntimeError(f"segments of {num_bytes} bytes exceed the capacity of {self._capacity}")

    # --- opening ---

    def _find(self, path: Path) -> None:
        """The directory's segments and their records. Damaged segments, and those beyond the capacity, are deleted."""
        for file in sorted(path.glob(f"*{SUFFIX}")):
            if len(self._places[path]) == self._max_segments:
                file.unlink()
                continue
            try:
                segment = Segment.open(file)
            except ValueError:
                file.unlink()
                continue
            if segment.slot_bytes != SLOT_BYTES or segment.num_slots > self._segment_slots:
                segment.close()
                file.unlink()
                continue
            place = _Place(segment)
            self._places[path].append(place)
            for run in segment.runs():
                if run.key is not None:
                    self._find_record(place, run)

    def _find_record(self, place: _Place, run: Run) -> None:
        assert run.key is not None
        place.take(run)
        entry, other = _Entry(place, run), self._entries.get(run.key)
        entry.is_findable = True
        if other is not None and other.run.generation > run.generation:
            entry, other = other, entry
        if other is not None:
            other.is_findable = False
            self._free(other)
        self._entries[run.key] = entry
        self._generation = max(self._generation, run.generation)

    def _take_over(self) -> None:
        """What was found becomes the tier's, the oldest first."""
        for key in sorted(self._entries, key=lambda key: self._entries[key].run.generation):
            self._policy.add(key)
            self._num_bytes += self._entries[key].run.num_bytes

    def _check_space(self) -> None:
        for path, places in self._places.items():
            lacking = (self._max_segments - len(places)) * self._segment_slots * SLOT_BYTES
            status = os.statvfs(path)
            if lacking > status.f_bavail * status.f_frsize:
                raise ValueError(
                    f"capacity must fit on the disk: {path} has {status.f_bavail * status.f_frsize} bytes free, "
                    f"{lacking} are needed"
                )

    def _close_files(self) -> None:
        for places in self._places.values():
            for place in places:
                place.segment.close()
            places.clear()
        while self._locks:
            os.close(self._locks.pop())

    # --- inside, with the lock held ---

    def _check_open(self) -> None:
        if self._is_closed:
            raise TierError(f"{self.name} is closed")

    def _open(self, key: Key) -> Reader | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        entry.num_readers += 1
        entry.last_used = time.time()
        self._policy.use(key)
        return _DiskReader(self, entry)

    def _make_room(self, num_slots: int) -> tuple[_Place, int] | None:
        """A free run: in a segment, in a new one, or by evicting; None, with nothing evicted, if that is not enough."""
        if num_slots > self._segment_slots - 1:
            return None
        self._free_unmarked()
        found = self._allocate(num_slots) or self._in_new_segment(num_slots)
        if found is not None:
            return found
        for key in [key for key in self._policy.victims() if self._entries[key].num_readers == 0]:
            self._forget(key)
            self._num_evicted += 1
            found = self._allocate(num_slots)
            if found is not None:
                return found
        return None

    def _allocate(self, num_slots: int) -> tuple[_Place, int] | None:
        """In the directory that has most room left, so that the load is spread."""
        places = [place for places in self._places.values() for place in places]
        for place in sorted(places, key=lambda place: -place.extents.num_free):
            begin = place.extents.allocate(num_slots)
            if begin is None:
                continue
            if self._try(lambda place=place, begin=begin: self._cut(place, begin, num_slots)):  # type: ignore[misc]
                return place, begin
            place.extents.release(begin)
        return None

    def _cut(self, place: _Place, begin: int, num_slots: int) -> None:
        """A free run's header reaches to its end: now that it is cut in two, each part gets its own, the second first.
        OSError: then nothing may be written there, since the next opening might not see it.
        """
        rest = place.extents.free_at(begin + num_slots)
        if rest:
            place.segment.mark(Run(begin + num_slots + 1, rest))
        place.segment.mark(Run(begin + 1, num_slots))

    def _in_new_segment(self, num_slots: int) -> tuple[_Place, int] | None:
        path = min(self._places, key=lambda path: len(self._places[path]))
        if len(self._places[path]) == self._max_segments:
            return None
        taken = {place.segment.path.name for place in self._places[path]}
        name = next(name for name in (f"{n:04}{SUFFIX}" for n in range(1 << 20)) if name not in taken)
        if not self._try(lambda: self._add_segment(path, name)):
            return None
        return self._allocate(num_slots)

    def _add_segment(self, path: Path, name: str) -> None:
        self._places[path].append(_Place(Segment.create(path / name, SLOT_BYTES, self._segment_slots)))

    def _forget(self, key: Key) -> bool:
        entry = self._entries.pop(key, None)
        if entry is None:
            return False
        self._policy.remove(key)
        self._num_bytes -= entry.run.num_bytes
        entry.is_findable = False
        self._mark_free(entry)
        if entry.num_readers == 0:
            self._free(entry)
        return True

    def _mark_free(self, entry: _Entry) -> None:
        run = entry.run
        if not entry.is_marked_free:
            entry.is_marked_free = self._try(lambda: entry.place.segment.mark(Run(run.slot, run.num_slots)))

    def _free(self, entry: _Entry) -> None:
        """Not before its header says so: a stale one would hide what is written behind it at the next opening."""
        self._mark_free(entry)
        if entry.is_marked_free:
            entry.place.extents.release(entry.run.slot - 1)
        else:
            self._unmarked.append(entry)

    def _free_unmarked(self) -> None:
        unmarked, self._unmarked = self._unmarked, []
        for entry in unmarked:
            self._free(entry)

    def _try(self, call: Callable[[], object]) -> bool:
        """Whether it was done; the disk's trouble is counted."""
        try:
            call()
        except OSError:
            self._num_errors += 1
            return False
        return True

    # --- for readers and writers ---

    def _do(self, call: Callable[[], T]) -> T:
        """TierError for the disk's trouble."""
        if self._is_closed:
            raise TierError(f"{self.name} is closed")
        try:
            return call()
        except OSError as error:
            self._num_errors += 1
            raise as_tier_error(self.name, error) from error

    def _commit(self, writer: Writer) -> bool:
        if not isinstance(writer, _DiskWriter) or not writer.is_open:
            raise ValueError("writers must be this tier's, and not closed")
        if not writer.is_whole:
            raise ValueError(f"a record of {writer.num_bytes} bytes must be written to its end before it is committed")
        writer.write_out()
        with self._lock:
            self._check_open()
            entry = writer.entry
            self._do(lambda: entry.place.segment.mark(entry.run))
            writer.is_open = False
            self._forget(writer.key)
            entry.is_findable = True
            self._entries[writer.key] = entry
            self._policy.add(writer.key)
            self._num_bytes += entry.run.num_bytes
        return True

    def _let_go(self, entry: _Entry) -> None:
        with self._lock:
            entry.num_readers -= 1
            if entry.num_readers == 0 and not entry.is_findable and not self._is_closed:
                self._free(entry)

    def _give_up(self, entry: _Entry) -> None:
        with self._lock:
            if not self._is_closed:
                self._free(entry)


def _lock(path: Path) -> int:
    """Held until the descriptor is closed, by the process's death at the latest."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise ValueError(f"{path} must be open once, another tier or process has it") from None
    return fd

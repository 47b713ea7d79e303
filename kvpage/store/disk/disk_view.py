"""DiskView: the records in a disk tier's directories, to look at beside the process that has them open.

    walk the headers, twice if they seem damaged ─► records ─► Reader: bytes, and then: is it still the record?

Nothing is locked, made or written. The owner goes on. Records that it removes or replaces meanwhile are gone from here
as well; records that it is writing are not there yet. After each piece the record's header is read again, which the
owner marks free before it gives the slots to others. So no byte of another record is ever handed out.
"""

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from kvpage.store.disk.directory import SEGMENT_NAME
from kvpage.store.disk.drive import Drive
from kvpage.store.disk.journal import Place
from kvpage.store.disk.lock import DiskOwner, owner_of
from kvpage.store.disk.reader_writer import STAGING_BYTES, Buffers, DiskReader
from kvpage.store.disk.segment import HEADER_BYTES, DamagedSegment, Run, Segment
from kvpage.store.disk.space import Entry, Space
from kvpage.store.tiers.tier import Key, Reader, ReadOnlyTier, RecordGone, RecordInfo, TierError, TierStats

MAX_WALKS = 8  # of a segment whose owner writes so much that no two walks find the same slots without a header
Result = TypeVar("Result")


class DiskView(ReadOnlyTier):
    """A disk tier to read only. Calls that would change a record raise TierError.

    The view has the records of the moment when it was made, without records that turn out to be gone.

    paths: directories of a disk tier.
    owners: the processes that have them open.

    Raises ValueError for segments of another version and for links; OSError for a directory that is not of a disk
    tier.
    """

    def __init__(self, paths: Sequence[str | Path], name: str = "disk") -> None:
        self.name = name
        self.buffers = Buffers(STAGING_BYTES)
        self.owners: tuple[DiskOwner, ...] = ()
        self._lock = threading.Lock()
        self._segments: list[Segment] = []
        self._closer = weakref.finalize(self, _close_all, self._segments)
        self._spaces: dict[bytes, Space] = {}  # by the segment's id
        self._entries: dict[Key, Entry] = {}
        self._at: dict[tuple[bytes, int], Entry] = {}  # by segment and slot: one that is written over is forgotten
        self._num_damaged = 0
        self._is_closed = False
        try:
            for path in paths:
                self._look_into(Path(path).absolute())
        except BaseException:
            self.close()
            raise

    def contains(self, keys: Sequence[Key], timeout: float | None = None) -> list[bool]:
        with self._lock:
            self._check_open()
            return [key in self._entries for key in keys]

    def open(self, keys: Sequence[Key], timeout: float | None = None) -> list[Reader | None]:
        """Return a reader for each key; None for a record that is gone."""
        with self._lock:
            self._check_open()
            entries = [self._entries.get(key) for key in keys]
        return [None if entry is None else self._reader(entry) for entry in entries]

    def infos(self) -> Iterator[RecordInfo]:
        """Walk over the records. last_used: the time of writing; later uses are known to the owner alone."""
        with self._lock:
            self._check_open()
            runs = [(key, entry.run) for key, entry in self._entries.items()]
        return iter([RecordInfo(key, run.num_bytes, run.written) for key, run in runs])

    def stats(self) -> TierStats:
        with self._lock:
            self._check_open()
            num_bytes = sum(entry.run.num_bytes for entry in self._entries.values())
            capacity = sum(segment.max_bytes for segment in self._segments)
            return TierStats(self.name, len(self._entries), num_bytes, capacity, corrupted=self._num_damaged)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._closer()

    # --- for a reader that keeps up with the owner ---

    def holds(self, key: Key) -> bool:
        """Return whether the record is there now, by its header on the disk."""
        with self._lock:
            entry = self._entries.get(key)
        try:
            return entry is not None and self.on_disk(entry, lambda: True)
        except TierError:
            return False

    def look_at(self, folder: Path, place: Place) -> None:
        """Add the record that the owner has written to a place. Raises OSError, ValueError."""
        with self._lock:
            segment = next((candidate for candidate in self._segments if candidate.id == place.segment_id), None)
            if segment is None:
                segment = self._new_segment(folder / f"{place.file:04}.segment", place.segment_id)
            if segment is None or not 0 < place.slot < segment.max_slots:
                return
            run = segment.run_at(place.slot)
            if run is not None and run.key is not None:
                self._add(Entry(self._space(segment), run))

    # --- for readers ---

    def on_disk(self, entry: Entry, call: Callable[..., Result], *args: object) -> Result:
        """Return the result of a call at the entry's file. Raises RecordGone if that is not the record's any more."""
        self._check_open()
        try:
            result = call(*args)
            is_there = entry.space.segment.holds(entry.run)
        except OSError as error:
            raise TierError(f"{entry.space.segment.path}: {error.strerror or error}") from error
        if not is_there:
            with self._lock:
                if self._entries.get(entry.key) is entry:
                    del self._entries[entry.key]
            raise RecordGone(f"{self.name}: the record was removed or replaced meanwhile")
        return result

    def let_go(self, entry: Entry) -> None:
        """Do nothing: no owner waits for it."""

    def give_up(self, entry: Entry) -> None:
        """Do nothing."""

    # --- inside ---

    def _look_into(self, path: Path) -> None:
        owner = owner_of(path)
        self.owners += () if owner is None else (owner,)
        ids: set[bytes] = set()
        for file in sorted(path.iterdir()):
            if not SEGMENT_NAME.fullmatch(file.name):
                continue
            try:
                segment = Segment.open(file, os.O_RDONLY)
            except FileNotFoundError:  # deleted since it was listed
                continue
            except DamagedSegment:
                self._num_damaged += 0 if owner is not None and _is_being_made(file) else 1
                continue
            self._segments.append(segment)
            if segment.id in ids:
                self._num_damaged += 1
                continue
            ids.add(segment.id)
            self._take(segment)

    def _take(self, segment: Segment) -> None:
        """Add the segment's records. Of several of one key the newest counts."""
        space = self._space(segment)
        records, num_damaged = _walk(segment)
        self._num_damaged += num_damaged
        for run in records:
            self._add(Entry(space, run))

    def _space(self, segment: Segment) -> Space:
        if segment.id not in self._spaces:
            self._spaces[segment.id] = Space(segment, Drive(segment.path.parent, 0.0))
        return self._spaces[segment.id]

    def _add(self, entry: Entry) -> None:
        position = entry.space.segment.id, entry.run.slot
        former = self._at.get(position)
        if former is not None and self._entries.get(former.key) is former:
            del self._entries[former.key]
        self._at[position] = entry
        there = self._entries.get(entry.key)
        if there is None or there.run.generation < entry.run.generation:
            self._entries[entry.key] = entry

    def _new_segment(self, file: Path, segment_id: bytes) -> Segment | None:
        """Return the segment in a file that was made since; None if it is gone, or another one."""
        try:
            segment = Segment.open(file, os.O_RDONLY)
        except (FileNotFoundError, DamagedSegment):
            return None
        if segment.id != segment_id:
            segment.close()
            return None
        self._segments.append(segment)
        return segment

    def _reader(self, entry: Entry) -> Reader | None:
        """Return None for a record that is gone. An error of the disk is left to the reader to raise."""
        try:
            self.on_disk(entry, int)
        except RecordGone:
            return None
        except TierError:
            pass
        return DiskReader(self, entry)

    def _check_open(self) -> None:
        if self._is_closed:
            raise TierError(f"{self.name} is closed")


def _close_all(segments: list[Segment]) -> None:
    for segment in segments:
        segment.close()


def _walk(segment: Segment) -> tuple[list[Run], int]:
    """Return the records, and the number of runs that no header describes.

    A run that the owner writes to during the walk seems to be one, too. Another walk finds its header.
    """
    unclaimed: set[Run] = set()
    for walk in range(MAX_WALKS):
        runs = list(segment.runs())
        before, unclaimed = unclaimed, {run for run in runs if not run.has_header}
        if not unclaimed or (walk and unclaimed == before):
            break
    else:
        unclaimed &= before
    return [run for run in runs if run.key is not None], len(unclaimed)


def _is_being_made(file: Path) -> bool:
    """Return whether its header, which is written last, is not there yet."""
    try:
        with open(file, "rb") as data:
            return not any(data.read(HEADER_BYTES))
    except FileNotFoundError:
        return True

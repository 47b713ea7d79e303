"""Directory: a lock and segments on one drive.

    journal        the places of records in the order of writing, for other processes that read
    lock           held while the tier is open, with its owner's name: a second process is refused
    0000.segment   made when it is needed, until the directory's share of the capacity is used up
    0001.segment   grows by a sixteenth, or by a record

After an error of a drive, the other directories are asked first for a while.
"""

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvpage.store.disk.drive import Drive
from kvpage.store.disk.journal import Journal, Place
from kvpage.store.disk.lock import give_lock, lock_path, take_lock
from kvpage.store.disk.segment import HEADER_BYTES, DamagedSegment, Segment, is_gone
from kvpage.store.disk.space import Entry, Space

SEGMENT_NAME = re.compile(r"\d{4,8}\.segment")
MIN_SEGMENT_SLOTS = 16
GROWTH = 16  # a segment grows by this part of its slots at least: few calls, and few bytes more than are needed


class Directory:
    """A directory of segments.

    share: bytes that they may have together; None for the present segments, and no others.
    """

    def __init__(
        self, path: Path, share: int | None, slot_bytes: int, segment_bytes: int, retry_seconds: float
    ) -> None:
        self.path, self.share = path, share
        self.spaces: list[Space] = []
        self.drive = Drive(path, retry_seconds)
        self.num_damaged = 0
        self._slot_bytes, self._segment_bytes, self._retry_seconds = slot_bytes, segment_bytes, retry_seconds
        self._dropped: list[Space] = []
        self._lock_path, self._lock_fd = lock_path(path), -1
        self._journal = Journal(path)

    def open(self) -> None:
        """Take the lock, and find the segments and their entries.

        Beyond the share the oldest segments are deleted, and so are damaged ones: nothing in them can be found. Without
        a share the directory must exist, and nothing is deleted.

        Raises ValueError for a directory that is in use or holds segments of another version; OSError. Then it is
        closed.
        """
        try:
            self._lock_fd = take_lock(self.path, make=self.share is not None)
            self._find_segments()
            self._keep_to_share()
            if self.share is not None:
                self._journal.begin()
        except BaseException:
            self.close()
            raise

    @property
    def num_bytes(self) -> int:
        """Return the bytes of its segments."""
        return sum([space.segment.num_bytes for space in self.spaces])

    @property
    def max_bytes(self) -> int:
        """Return the bytes that its segments may grow to."""
        return sum([space.segment.max_bytes for space in self.spaces])

    @property
    def num_unassigned(self) -> int:
        """Return the bytes of segments that may still be added."""
        return max(self.share - self.max_bytes, 0) if self.share is not None else 0

    @property
    def num_lacking(self) -> int:
        """Return the bytes that segments may still take on the disk."""
        return max(self.share - self.num_bytes, 0) if self.share is not None else 0

    @property
    def num_free_bytes(self) -> int:
        """Return the bytes that are free in segments, or could be."""
        return self.num_unassigned + sum([space.num_free_bytes for space in self.spaces])

    @property
    def entries(self) -> Iterator[Entry]:
        return (entry for space in self.spaces for entry in space.entries)

    def is_deleted(self) -> bool:
        """Return whether it was deleted or moved. Raises OSError.

        Its open files can still be used, and are lost afterwards. A directory that took its place is not locked by us.
        """
        return is_gone(self._lock_path, self._lock_fd)

    def grow(self, num_bytes: int) -> Space | None:
        """Return a space whose segment has grown, or a new one, for a record of `num_bytes` at its end.

        None if the share does not allow it, or the disk refused it a moment ago. Raises OSError if the disk refuses it.
        """
        if self.drive.is_full:
            return None
        num_slots = -(-(HEADER_BYTES + num_bytes) // self._slot_bytes)
        for space in self.spaces:
            num_lacking, segment = space.num_lacking(num_slots), space.segment
            if 0 < num_lacking <= space.num_growable:
                segment.lengthen(min(segment.num_slots + _growth(num_lacking, segment.num_slots), segment.max_slots))
                return space
        max_slots = min(self._segment_bytes, self.num_unassigned) // self._slot_bytes
        if max_slots < max(MIN_SEGMENT_SLOTS, num_slots + 1):
            return None
        first = min(_growth(num_slots + 1, 0), max_slots)
        segment = Segment.create(self._free_name(), self._slot_bytes, first, max_slots)
        self.spaces.append(Space(segment, self.drive))
        return self.spaces[-1]

    def successor(self) -> "Directory":
        """Return one of the same path and counts, to be opened when this one was deleted."""
        other = Directory(self.path, self.share, self._slot_bytes, self._segment_bytes, self._retry_seconds)
        other.drive.num_errors = self.drive.num_errors
        return other

    def published(self, entry: Entry) -> None:
        """Tell other processes that read of a record that can be found now."""
        if self.share is not None:
            segment = entry.space.segment
            self._journal.add(Place(segment.id, int(segment.path.stem), entry.run.slot))

    def drop(self, space: Space) -> None:
        """Leave out a segment that was deleted. It is closed now, or with the others while it is in use."""
        if space in self.spaces:
            self.spaces.remove(space)
            if any(entry.num_users for entry in space.entries):
                self._dropped.append(space)
            else:
                space.segment.close()

    def sync(self) -> None:
        """Write all segments and their names to the disk. Raises OSError."""
        for space in list(self.spaces):
            space.segment.sync()
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)  # the names of the segments
        finally:
            os.close(fd)

    def close(self) -> None:
        """Close the segments and give back the lock. A second call does nothing."""
        for space in [*self.spaces, *self._dropped]:
            space.segment.close()
        self._journal.close()
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            give_lock(fd)

    # --- opening ---

    def _find_segments(self) -> None:
        ids: set[bytes] = set()
        for path in sorted(self.path.iterdir()):
            if not SEGMENT_NAME.fullmatch(path.name):
                continue
            try:
                segment = Segment.open(path)
                self.spaces.append(Space(segment, self.drive))  # from here on `close` closes it
                if segment.id in ids:
                    raise DamagedSegment(f"{path} is a copy of another segment")
                ids.add(segment.id)
            except DamagedSegment:
                self._leave_out(path)
                continue
            self.spaces[-1] = Space.found(segment, self.drive)
            self._mend(self.spaces[-1])

    def _mend(self, space: Space) -> None:
        """Write headers for slots without one, so that the next opening need not walk over them one by one."""
        self.num_damaged += len(space.unclaimed)
        for run in space.unclaimed if self.share is not None else []:
            space.segment.cover(run)

    def _leave_out(self, path: Path) -> None:
        self.num_damaged += 1
        if self.spaces and self.spaces[-1].segment.path == path:
            self.spaces.pop().segment.close()
        if self.share is not None:
            path.unlink()

    def _keep_to_share(self) -> None:
        """Delete the segments beyond the share, the least recently written first."""
        self.spaces.sort(key=_last_generation)
        while self.share is not None and self.max_bytes > self.share:
            segment = self.spaces.pop(0).segment
            segment.close()
            segment.path.unlink()

    def _free_name(self) -> Path:
        names = {space.segment.path.name for space in self.spaces}.union(os.listdir(self.path))
        return self.path / next(name for name in (f"{n:04}.segment" for n in range(10**8)) if name not in names)


def _growth(num_lacking: int, num_slots: int) -> int:
    """Return by how many slots a segment of `num_slots` grows."""
    return max(num_lacking, num_slots // GROWTH, MIN_SEGMENT_SLOTS)


def _last_generation(space: Space) -> int:
    return max((entry.run.generation for entry in space.entries), default=0)


def check_space(directories: Sequence[Directory]) -> None:
    """Raise ValueError unless the disks have the space that the directories lack."""
    lacking: dict[int, int] = {}  # by drive
    for directory in directories:
        status, device = os.statvfs(directory.path), os.stat(directory.path).st_dev
        lacking[device] = lacking.get(device, 0) + directory.num_lacking
        if lacking[device] > status.f_bavail * status.f_frsize:
            raise ValueError(
                f"capacity must fit on the disk: {directory.path} has {status.f_bavail * status.f_frsize} bytes free, "
                f"{lacking[device]} more are needed"
            )

"""Journal: the places of the records that a disk tier has committed, for other processes that read beside it.

    journal    [ magic, id, number | place | place | place ...     a new file after MAX_BYTES, with the next number
                                            ▲
                                            └── where a JournalTail has read to: only what follows is new to it

It is a hint. A reader of a place looks at the header there, which alone names the record. So a journal that lies,
or lacks something, costs a miss and never a wrong byte. An owner that opens the directory begins a journal of another
id. Then its readers walk through the headers once more.
"""

import os
import secrets
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kvpage.store.disk.segment import open_file, write_all

HEAD = struct.Struct("<8s16sQ")
PLACE = struct.Struct("<16sQQ")
MAGIC = b"kvpagejr"
MAX_BYTES = 1 << 20


class Place(NamedTuple):
    """Where a record was written. segment_id: of the segment. file: the number in its name. slot: of the record."""

    segment_id: bytes
    file: int
    slot: int


def journal_path(folder: Path) -> Path:
    return folder / "journal"


class Journal:
    """The owner's side. Callers hold the tier's `changes`. An error of the disk makes it begin anew later."""

    def __init__(self, folder: Path) -> None:
        self._path = journal_path(folder)
        self._id, self._number, self._fd, self._end = b"", 0, -1, 0

    def begin(self) -> None:
        """Begin with another id: readers look at everything."""
        self._id, self._number = secrets.token_bytes(16), 0
        self._new_file()

    def add(self, place: Place) -> None:
        """Add the place of a record that can be found there now."""
        if self._end + PLACE.size > MAX_BYTES and self._fd >= 0:
            self._number += 1
            self._new_file()
        if self._fd < 0:
            self.begin()
            return
        try:
            write_all(self._fd, memoryview(PLACE.pack(*place)), self._end)
            self._end += PLACE.size
        except OSError:
            self.close()

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _new_file(self) -> None:
        """Put a new file in the place of the old one, whose readers still have it."""
        self.close()
        made = self._path.with_name("journal.new")
        with suppress(OSError):
            made.unlink(missing_ok=True)
            fd = open_file(made, os.O_CREAT | os.O_EXCL)
            try:
                write_all(fd, memoryview(HEAD.pack(MAGIC, self._id, self._number)), 0)
                os.rename(made, self._path)
            except OSError:
                os.close(fd)
                raise
            self._fd, self._end = fd, HEAD.size


class JournalTail:
    """A reader's side. Callers take turns."""

    def __init__(self, folder: Path) -> None:
        self._path = journal_path(folder)
        self._fd, self._at = -1, 0
        self._head: tuple[bytes, int] | None = None

    def poll(self) -> list[Place] | None:
        """Return the places that were added since; None if all must be looked at, whose places are added afterwards.

        Raises FileNotFoundError without a journal, and other errors of the disk.
        """
        there = os.stat(self._path)
        if self._fd >= 0 and os.path.samestat(there, os.fstat(self._fd)):
            return list(self._new_places(there.st_size))
        fd = open_file(self._path, os.O_NONBLOCK, os.O_RDONLY)  # a pipe of that name may have no writer
        try:
            head = _head_of(fd)
        except BaseException:
            os.close(fd)
            raise
        places = None
        if self._head is not None and head == (self._head[0], self._head[1] + 1):
            places = list(self._new_places(os.fstat(self._fd).st_size))
        self.close()
        self._fd, self._head, self._at = fd, head, HEAD.size
        size = os.fstat(fd).st_size
        if places is None:
            self._at = max(size - (size - HEAD.size) % PLACE.size, HEAD.size)
            return None
        return [*places, *self._new_places(size)]

    def close(self) -> None:
        """Close the file. The next poll returns None."""
        fd, self._fd, self._head = self._fd, -1, None
        if fd >= 0:
            os.close(fd)

    def _new_places(self, size: int) -> Iterator[Place]:
        while self._at + PLACE.size <= size:
            data = os.pread(self._fd, (size - self._at) // PLACE.size * PLACE.size, self._at)
            whole = len(data) // PLACE.size * PLACE.size
            if not whole:
                return
            self._at += whole
            yield from map(Place._make, PLACE.iter_unpack(data[:whole]))


def _head_of(fd: int) -> tuple[bytes, int]:
    """Return id and number. Raises OSError for a file that is no journal."""
    data = os.pread(fd, HEAD.size, 0)
    if len(data) < HEAD.size or not data.startswith(MAGIC):
        raise OSError("the file is no journal")
    _, journal_id, number = HEAD.unpack(data)
    return journal_id, number

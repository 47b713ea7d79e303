"""Segment: a file of small slots that grows at its end, in which every run of slots has a header.

    slot 0     segment header: magic, version, a random id, slot size, the most slots it may have
    slot 1     [ record header | record ........................ ]      as many slots as it needs
    slot 9     [ free header   | left over from earlier ......... ]     a free run, to the next header
    slot 40    [ record header | record ]

A run's header names its segment's random id and its own slot. So no byte of a record, no slot that was swapped or
copied, and no foreign file can pass for one. Opening walks from header to header; where one is damaged, from slot to
slot. Three rules keep the walk right, whenever the process dies:

- a free run is cut in two by writing the header of its end before that of its beginning;
- the header of a record is written after the record: until then the run is a free one;
- a run is given to others only after its header marks it free: no header of a record is ever left over.

The file's length tells how many slots there are: no header changes when it grows. New slots are preallocated. Their
free header comes first, so that a growth that is cut off leaves a shorter free run. A file that is shorter than it was
lacks the records at its end.

Nothing is synchronised on the way. A write that a loss of power tears fails its header's checksum, or the record's.
"""

import ctypes
import errno
import os
import secrets
import struct
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

import xxhash

from kvpage.store.tiers.stretches import Runs, read_stretches, write_stretches
from kvpage.store.tiers.tier import Key

SEGMENT = struct.Struct("<8sI4x16sQQ8s")  # magic, version, id, slot bytes, slots, checksum
RUN = struct.Struct("<8sI4x16sQQQQd32s8s")  # magic, kind, id, slot, slots, generation, bytes, written, key, checksum
SEGMENT_MAGIC, RUN_MAGIC, VERSION = b"kvpagesg", b"kvpagern", 1
FREE, RECORD = 0, 1
KEEP_SIZE, PUNCH_HOLE = 1, 2  # of fallocate(2)
HEADER_BYTES = 128  # of a run: the record begins after it
BLOCK_BYTES = 512  # of st_blocks
MAX_SLOT_BYTES, MAX_SEGMENT_BYTES = 1 << 20, 1 << 50  # a file beyond them is not a segment
NO_KEY = bytes(32)
assert RUN.size <= HEADER_BYTES


class DamagedSegment(Exception):
    """A file that is not a segment, or whose header or length is wrong: no record in it can be found."""


class EndOfFile(OSError):
    """A file that is shorter than it was."""


class Run(NamedTuple):
    """A run of slots.

    key: None for a free one. written: seconds of time.time(). has_header: False for slots that no header describes,
    which count as free.
    """

    slot: int
    num_slots: int
    generation: int = 0
    num_bytes: int = 0
    written: float = 0.0
    key: Key | None = None
    has_header: bool = True

    @property
    def end(self) -> int:
        return self.slot + self.num_slots


def open_file(path: Path, flags: int = 0, access: int = os.O_RDWR) -> int:
    """Return a descriptor to read and write, or as `access` says. A new file is for its owner alone.

    Raises ValueError for a symbolic link, which may lead out of the directory; OSError.
    """
    try:
        return os.open(path, access | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ValueError(f"{path} must be a file, got a symbolic link") from None
        raise


def is_gone(path: Path, fd: int) -> bool:
    """Return whether the path no longer leads to the descriptor's file, since that was deleted or moved.

    Raises OSError.
    """
    here = os.fstat(fd)
    try:
        there = os.stat(path, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return True
    return (here.st_dev, here.st_ino) != (there.st_dev, there.st_ino)


class Segment:
    """One file. Thread-safe but for `close`, when no thread may be reading or writing, and `lengthen`, one at a time.

    num_slots: that the file has. max_slots: that it may have. has_holes: whether some slots may lack space on the disk.
    """

    def __init__(self, path: Path, fd: int, segment_id: bytes, slot_bytes: int, num_slots: int, max_slots: int) -> None:
        self.path, self.slot_bytes = path, slot_bytes
        self.num_slots, self.max_slots = num_slots, max_slots
        self.id = segment_id
        self.has_holes = False
        self._fd = fd

    @classmethod
    def create(cls, path: Path, slot_bytes: int, num_slots: int, max_slots: int) -> "Segment":
        """Preallocate the first slots. Raises OSError (ENOSPC), and leaves no file, if the space is not there."""
        fd = open_file(path, os.O_CREAT | os.O_EXCL)
        try:
            os.posix_fallocate(fd, 0, slot_bytes * num_slots)
            segment = cls(path, fd, secrets.token_bytes(16), slot_bytes, num_slots, max_slots)
            segment.cover(Run(1, num_slots - 1))
            head = SEGMENT.pack(SEGMENT_MAGIC, VERSION, segment.id, slot_bytes, max_slots, bytes(8))
            write_all(fd, memoryview(_with_checksum(head)), 0)  # last: without it the file is no segment
            return segment
        except BaseException:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise

    @classmethod
    def open(cls, path: Path, access: int = os.O_RDWR) -> "Segment":
        """Open a segment; access: os.O_RDONLY to read alone.

        Raises DamagedSegment for a file that is not one; ValueError for one of another version, and for a link;
        OSError.
        """
        fd = open_file(path, access=access)
        try:
            head = os.pread(fd, SEGMENT.size, 0)
            if len(head) < SEGMENT.size or not _is_whole(head) or not head.startswith(SEGMENT_MAGIC):
                raise DamagedSegment(f"{path} is not a segment, or a damaged one")
            _, version, segment_id, slot_bytes, max_slots, _ = SEGMENT.unpack(head)
            if version != VERSION:
                raise ValueError(f"segments must be of version {VERSION}, {path} is of version {version}")
            if not HEADER_BYTES <= slot_bytes <= MAX_SLOT_BYTES or not 2 <= max_slots <= MAX_SEGMENT_BYTES:
                raise DamagedSegment(f"{path} has {max_slots} slots of {slot_bytes} bytes")
            status = os.fstat(fd)
            num_bytes = status.st_size
            if not 2 * slot_bytes <= num_bytes <= max_slots * slot_bytes:
                raise DamagedSegment(f"{path} is of {num_bytes} bytes, not of 2 to {max_slots} slots of {slot_bytes}")
            segment = cls(path, fd, segment_id, slot_bytes, num_bytes // slot_bytes, max_slots)
            segment.has_holes = status.st_blocks * BLOCK_BYTES < num_bytes
            return segment
        except BaseException:
            os.close(fd)
            raise

    @property
    def num_bytes(self) -> int:
        return self.slot_bytes * self.num_slots

    @property
    def max_bytes(self) -> int:
        return self.slot_bytes * self.max_slots

    def lengthen(self, num_slots: int) -> None:
        """Add free slots to the end, up to `num_slots`. Raises OSError (ENOSPC): then the file is as it was."""
        begin = self.num_slots
        if num_slots <= begin:
            return
        try:
            self.cover(Run(begin, num_slots - begin))
            os.posix_fallocate(self._fd, begin * self.slot_bytes, (num_slots - begin) * self.slot_bytes)
        except BaseException:
            with suppress(OSError):  # else the next growth writes over what is there
                os.ftruncate(self._fd, begin * self.slot_bytes)
            raise
        self.num_slots = num_slots

    def give_back(self, run: Run) -> None:
        """Give back the space of a free run's slots but the first, which has the header. Does nothing if it cannot."""
        if run.num_slots > 1:
            begin, num_bytes = (run.slot + 1) * self.slot_bytes, (run.num_slots - 1) * self.slot_bytes
            self.has_holes |= punch_hole(self._fd, begin, num_bytes)

    def reserve(self, run: Run) -> None:
        """Take the space of the run's slots again. Raises OSError (ENOSPC)."""
        os.posix_fallocate(self._fd, run.slot * self.slot_bytes, run.num_slots * self.slot_bytes)

    def slots_for(self, num_bytes: int) -> int:
        """Return the number of slots of a record with its header."""
        return -(-(HEADER_BYTES + num_bytes) // self.slot_bytes)

    def runs(self) -> Iterator[Run]:
        """Walk over all runs in their order. Raises OSError."""
        slot, lost = 1, 0
        while slot < self.num_slots:
            run = self.run_at(slot)
            if run is None:
                lost, slot = lost + 1, slot + 1
                continue
            if lost:
                yield Run(slot - lost, lost, has_header=False)
            yield run
            lost, slot = 0, run.end
        if lost:
            yield Run(slot - lost, lost, has_header=False)

    def header(self, run: Run) -> bytes:
        """Return the run's header, HEADER_BYTES long."""
        kind = FREE if run.key is None else RECORD
        fields = (run.slot, run.num_slots, run.generation, run.num_bytes, run.written, run.key or NO_KEY)
        return _with_checksum(RUN.pack(RUN_MAGIC, kind, self.id, *fields, bytes(8))).ljust(HEADER_BYTES, b"\0")

    def holds(self, run: Run) -> bool:
        """Return whether the header on the disk is still the run's. Raises OSError."""
        header = bytearray(HEADER_BYTES)
        self.read(run, 0, memoryview(header))
        return header == self.header(run)

    def mark(self, run: Run) -> None:
        """Write the run's header and leave the bytes after it. Raises OSError."""
        write_all(self._fd, memoryview(self.header(run)), run.slot * self.slot_bytes)

    def cover(self, run: Run) -> None:
        """Write the run's header, and zeros to the end of its slot. Raises OSError.

        A whole slot need not be read from the disk before it is written.
        """
        write_all(self._fd, memoryview(self.header(run).ljust(self.slot_bytes, b"\0")), run.slot * self.slot_bytes)

    def write(self, run: Run, offset: int, data: memoryview) -> None:
        """Write at `offset` bytes from the beginning of the run's header. Raises OSError."""
        write_all(self._fd, data, run.slot * self.slot_bytes + offset)

    def write_runs(
        self,
        run: Run,
        offset: int,
        lead: memoryview,
        runs: Runs,
        stretch_bytes: int,
        tail: memoryview,
        num_threads: int,
    ) -> bytes:
        """Call write_stretches at `offset` bytes from the beginning of the run's header. Raises OSError."""
        return write_stretches(
            self._fd, run.slot * self.slot_bytes + offset, lead, runs, stretch_bytes, tail, num_threads
        )

    def read(self, run: Run, offset: int, into: memoryview) -> None:
        """Fill `into` from `offset` bytes after the beginning of the header. Raises EndOfFile or another OSError."""
        at = run.slot * self.slot_bytes + offset
        while len(into):
            count = os.preadv(self._fd, [into], at)
            if count == 0:
                raise EndOfFile(errno.EIO, "the file ends too early")
            into, at = into[count:], at + count

    def read_runs(
        self, run: Run, offset: int, runs: Runs, stretch_bytes: int, room: memoryview, num_threads: int
    ) -> bytes:
        """Call read_stretches at `offset` bytes after the header's beginning. Raises EndOfFile or another OSError."""
        try:
            return read_stretches(self._fd, run.slot * self.slot_bytes + offset, runs, stretch_bytes, room, num_threads)
        except OSError as error:
            if error.errno == errno.ENODATA:
                raise EndOfFile(errno.EIO, "the file ends too early") from None
            raise

    def sync(self) -> None:
        os.fsync(self._fd)

    def is_deleted(self) -> bool:
        """Return whether its name no longer leads to it. Raises OSError."""
        return is_gone(self.path, self._fd)

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def run_at(self, slot: int) -> Run | None:
        """Return the run that a whole header in this slot describes; None if there is none. Raises OSError."""
        head = os.pread(self._fd, RUN.size, slot * self.slot_bytes)
        if len(head) < RUN.size or not _is_whole(head):
            return None
        magic, kind, segment_id, at, num_slots, generation, num_bytes, written, key, _ = RUN.unpack(head)
        if (magic, segment_id, at) != (RUN_MAGIC, self.id, slot) or not 0 < num_slots <= self.max_slots - slot:
            return None
        num_there = min(num_slots, self._num_slots_now(slot + num_slots) - slot)
        if kind == FREE and num_there > 0:
            return Run(slot, num_there)
        fits = kind == RECORD and num_there == num_slots == self.slots_for(num_bytes)
        return Run(slot, num_slots, generation, num_bytes, written, key) if fits else None

    def _num_slots_now(self, end: int) -> int:
        """Return the number of slots. If `end` is beyond it, the file may have grown: its owner is another process."""
        if end > self.num_slots:
            self.num_slots = max(self.num_slots, min(os.fstat(self._fd).st_size // self.slot_bytes, self.max_slots))
        return self.num_slots


def write_all(fd: int, data: memoryview, offset: int) -> None:
    """Write all of the data. A disk that becomes full writes less at first, before its error."""
    while len(data):
        count = os.pwrite(fd, data, offset)
        if count == 0:
            raise OSError(errno.EIO, "nothing was written")
        data, offset = data[count:], offset + count


def punch_hole(fd: int, offset: int, num_bytes: int) -> bool:
    """Give the space of these bytes back to the file system. Returns False where it cannot: they stay as they are."""
    fallocate = _fallocate()
    return fallocate is not None and fallocate(fd, KEEP_SIZE | PUNCH_HOLE, offset, num_bytes) == 0


@cache
def _fallocate() -> "ctypes._NamedFuncPointer | None":
    call = getattr(ctypes.CDLL(None), "fallocate", None)
    if call is not None:
        call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return call


def _with_checksum(head: bytes) -> bytes:
    """Return the header with its last eight bytes replaced by the checksum of the others."""
    return head[:-8] + xxhash.xxh3_64_digest(head[:-8])


def _is_whole(head: bytes) -> bool:
    return xxhash.xxh3_64_digest(head[:-8]) == head[-8:]

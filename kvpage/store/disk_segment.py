"""Segment: a preallocated file of small slots, in which every run of slots says what it is.

    slot 0     segment header: magic, version, a random id, slot size, number of slots
    slot 1     [ record header | record ........................ ]      as many slots as it needs
    slot 9     [ free header   | left over from earlier ......... ]     a free run, to the next header
    slot 40    [ record header | record ]

A run's header names its segment's random id and its own slot, so that no byte of a record, no block that was swapped or
copied, and no foreign file can pass for one. Opening walks from header to header; where one is torn, from slot to slot.
The header of a record is written after the record: a crash before that leaves a free run. Nothing is synchronised on
the way: what a loss of power tears fails the record's checksum.
"""

import errno
import os
import secrets
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import xxhash

from kvpage.store.tier import Key, TierError

SEGMENT = struct.Struct("<8sI4x16sQQ8s")  # magic, version, id, slot bytes, slots, checksum
RUN = struct.Struct("<8sI4x16sQQQQ32s8s")  # magic, kind, id, slot, slots, generation, record bytes, key, checksum
SEGMENT_MAGIC, RUN_MAGIC, VERSION = b"kvpagesg", b"kvpagern", 1
FREE, RECORD = 0, 1
HEADER_BYTES = 128  # of a run: the record begins behind it
NO_KEY = bytes(32)
assert RUN.size == 104


class Run(NamedTuple):
    """A run of slots. key: None for a free one."""

    slot: int
    num_slots: int
    generation: int = 0
    num_bytes: int = 0
    key: Key | None = None


class Segment:
    """One file. Made anew by `create`, found again by `open`: OSError from both, ValueError for what is no segment."""

    def __init__(self, path: Path, fd: int, segment_id: bytes, slot_bytes: int, num_slots: int) -> None:
        self.path, self.slot_bytes, self.num_slots = path, slot_bytes, num_slots
        self._fd, self._id = fd, segment_id

    @classmethod
    def create(cls, path: Path, slot_bytes: int, num_slots: int) -> "Segment":
        """Preallocates the file; OSError (ENOSPC), and no file, if the space is not there."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, slot_bytes * num_slots)
            segment = cls(path, fd, secrets.token_bytes(16), slot_bytes, num_slots)
            head = SEGMENT.pack(SEGMENT_MAGIC, VERSION, segment._id, slot_bytes, num_slots, bytes(8))[:-8]
            segment.mark(Run(1, num_slots - 1))
            write_all(fd, memoryview(head + xxhash.xxh3_64_digest(head)), 0)
            return segment
        except BaseException:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise

    @classmethod
    def open(cls, path: Path) -> "Segment":
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            head = os.pread(fd, SEGMENT.size, 0)
            if len(head) < SEGMENT.size or xxhash.xxh3_64_digest(head[:-8]) != head[-8:]:
                raise ValueError(f"{path} is no segment, or a damaged one")
            magic, version, segment_id, slot_bytes, num_slots, _ = SEGMENT.unpack(head)
            if (magic, version) != (SEGMENT_MAGIC, VERSION) or slot_bytes * num_slots != os.fstat(fd).st_size:
                raise ValueError(f"{path} is a segment of another version or length")
            return cls(path, fd, segment_id, slot_bytes, num_slots)
        except BaseException:
            os.close(fd)
            raise

    def runs(self) -> Iterator[Run]:
        """All runs in their order; what no header tells of is free, too."""
        slot, lost = 1, 0
        while slot < self.num_slots:
            run = self._run_at(slot)
            if run is None:
                lost, slot = lost + 1, slot + 1
                continue
            if lost:
                yield Run(slot - lost, lost)
            yield run
            lost, slot = 0, slot + run.num_slots
        if lost:
            yield Run(slot - lost, lost)

    def mark(self, run: Run) -> None:
        """Writes the run's header. OSError."""
        kind = FREE if run.key is None else RECORD
        fields = (run.slot, run.num_slots, run.generation, run.num_bytes, run.key or NO_KEY)
        head = RUN.pack(RUN_MAGIC, kind, self._id, *fields, bytes(8))[:-8]
        write_all(self._fd, memoryview(head + xxhash.xxh3_64_digest(head)), run.slot * self.slot_bytes)

    def write(self, slot: int, offset: int, data: memoryview) -> None:
        """Bytes of the record at the slot. OSError."""
        write_all(self._fd, data, slot * self.slot_bytes + HEADER_BYTES + offset)

    def read(self, slot: int, offset: int, into: memoryview) -> None:
        """OSError, also where the file ends too early."""
        read_all(self._fd, into, slot * self.slot_bytes + HEADER_BYTES + offset)

    def sync(self) -> None:
        os.fsync(self._fd)

    def close(self) -> None:
        os.close(self._fd)

    def _run_at(self, slot: int) -> Run | None:
        head = os.pread(self._fd, RUN.size, slot * self.slot_bytes)
        if len(head) < RUN.size or xxhash.xxh3_64_digest(head[:-8]) != head[-8:]:
            return None
        magic, kind, segment_id, at, num_slots, generation, num_bytes, key, _ = RUN.unpack(head)
        if (magic, segment_id, at) != (RUN_MAGIC, self._id, slot) or not 0 < num_slots <= self.num_slots - slot:
            return None
        if kind == FREE:
            return Run(slot, num_slots)
        fits = kind == RECORD and num_slots == slots_for(num_bytes, self.slot_bytes)
        return Run(slot, num_slots, generation, num_bytes, key) if fits else None


def slots_for(num_bytes: int, slot_bytes: int) -> int:
    """Of a record with its header."""
    return -(-(HEADER_BYTES + num_bytes) // slot_bytes)


def write_all(fd: int, data: memoryview, offset: int) -> None:
    """Goes on after short writes, as a disk that becomes full gives before its error."""
    while len(data):
        count = os.pwrite(fd, data, offset)
        if count == 0:
            raise OSError(errno.EIO, "nothing was written")
        data, offset = data[count:], offset + count


def read_all(fd: int, into: memoryview, offset: int) -> None:
    while len(into):
        count = os.preadv(fd, [into], offset)
        if count == 0:
            raise OSError(errno.EIO, "the file ends too early")
        into, offset = into[count:], offset + count


def as_tier_error(name: str, error: OSError) -> TierError:
    return TierError(f"{name}: {error.strerror or error}")

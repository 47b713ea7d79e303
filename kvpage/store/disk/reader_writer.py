"""Readers and writers of the disk tier, and the buffers between them and the disk.

    write   [ free header | piece 0 | piece 1 |.....]  ─►  whole slots to the disk, the remainder to the front, and on
            [ free header | piece 0 ] and the runs     ─►  likewise, from where they are in memory
    commit  [ record header ]                              over the free one, after all else
    read    disk ─► [ piece ]                              or on to runs of memory

Buffers are small enough for a core's cache to keep bytes that are filled, hashed and written in turn. They are large
enough that few calls are made. They begin at a page, and writes begin and end at a slot:
no page is read only to be written.
"""

import mmap
from collections.abc import Callable
from typing import Protocol, TypeVar

import numpy as np

from kvpage.store.disk.segment import HEADER_BYTES, Run
from kvpage.store.disk.space import Entry
from kvpage.store.tiers.stretches import Runs
from kvpage.store.tiers.tier import Reader, TierError, Writer

STAGING_BYTES = (2 << 20) + (1 << 16)  # pieces of 1 MiB, and the rest of the one before
WRITE_BYTES = 1 << 20  # of pieces: more leave a core's cache before they are written
CUT_BYTES = 1 << 16  # of a file, at whose multiples a write of many pieces ends, if slots do: its pages join
MAX_KEPT = 16
Result = TypeVar("Result")


class Buffers:
    """Buffers that are used again. Thread-safe: list operations are atomic, and one too many does no harm."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._kept: list[memoryview] = []

    def take(self) -> memoryview:
        try:
            return self._kept.pop()
        except IndexError:
            return new_buffer(self.num_bytes)

    def give(self, buffer: memoryview) -> None:
        if len(buffer) == self.num_bytes and len(self._kept) < MAX_KEPT:
            self._kept.append(buffer)


def new_buffer(num_bytes: int) -> memoryview:
    """Return anonymous memory that begins at a page. Raises TierError if there is none."""
    try:
        return memoryview(mmap.mmap(-1, num_bytes))
    except OSError as error:
        raise TierError(f"no memory for a buffer of {num_bytes} bytes: {error.strerror}") from error


class Owner(Protocol):
    """The part of a tier that its readers and writers use."""

    buffers: Buffers

    def on_disk(self, entry: Entry, call: Callable[..., Result], *args: object) -> Result:
        """Return the result of a call at the entry's file. Raises TierError for trouble, and for a closed tier."""

    def let_go(self, entry: Entry) -> None:
        """Take away one user."""

    def give_up(self, entry: Entry) -> None:
        """Take away the user of a record that was not committed: its slots are free."""


class DiskReader(Reader):
    """Reads a record piece by piece into one buffer, or by way of it into runs of memory."""

    takes_runs = True

    def __init__(self, owner: Owner, entry: Entry) -> None:
        self.num_bytes = entry.run.num_bytes
        self._owner, self._entry = owner, entry
        self._buffer: memoryview | None = None
        self._is_open = True

    def read_runs(self, begin: int, runs: Runs, stretch_bytes: int, num_threads: int) -> bytes:
        buffer, entry = self._buffer_for(begin, begin + int(np.add.reduce(runs[:, 1]))), self._entry
        return self._owner.on_disk(
            entry,
            entry.space.segment.read_runs,
            entry.run,
            HEADER_BYTES + begin,
            runs,
            stretch_bytes,
            buffer,
            num_threads,
        )

    def piece(self, begin: int, end: int) -> memoryview:
        buffer = self._buffer_for(begin, end)
        if len(buffer) < end - begin:
            self.release_piece()  # before a new one may fail: a buffer that is given twice would have two users
            self._buffer = buffer = new_buffer(end - begin)
        view, entry = buffer[: end - begin], self._entry
        self._owner.on_disk(entry, entry.space.segment.read, entry.run, HEADER_BYTES + begin, view)
        return view

    def _buffer_for(self, begin: int, end: int) -> memoryview:
        """Return the reader's buffer. Raises ValueError for bytes that the record lacks, and for a closed reader."""
        if not self._is_open:
            raise ValueError("a reader must not be closed, this one is")
        if not 0 <= begin <= end <= self.num_bytes:
            raise ValueError(f"a piece must be in [0, {self.num_bytes}], got [{begin}, {end}]")
        if self._buffer is None:
            self._buffer = self._owner.buffers.take()
        return self._buffer

    def release_piece(self) -> None:
        if self._buffer is not None:
            self._owner.buffers.give(self._buffer)
            self._buffer = None

    def is_there(self) -> bool:
        """Return whether the header on the disk is still the record's. Raises TierError."""
        return self._owner.on_disk(self._entry, self._entry.space.segment.holds, self._entry.run)

    def close(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        self.release_piece()
        self._owner.let_go(self._entry)


class DiskWriter(Writer):
    """Writes a record into a run whose header on the disk is a free one.

    entry: the run, with the record's key and length.
    buffer: one of the owner's; it goes back there.
    """

    takes_runs = True

    def __init__(self, owner: Owner, entry: Entry, buffer: memoryview) -> None:
        self.entry = entry
        self.key, self.num_bytes = entry.key, entry.run.num_bytes
        self.is_open = True
        self.owner = owner
        self._segment, self._slot_bytes = entry.space.segment, entry.space.segment.slot_bytes
        self._end = 0  # of the pieces
        self._buffer = buffer
        self._begin = 0  # of the buffer, in the run
        self._filled = HEADER_BYTES  # of the buffer
        self._buffer[:HEADER_BYTES] = self._segment.header(Run(entry.run.slot, entry.run.num_slots))

    def write_runs(self, runs: Runs, stretch_bytes: int, num_threads: int) -> bytes:
        num_bytes = int(np.add.reduce(runs[:, 1]))
        self._check_next(self._end, self._end + num_bytes)
        if self._filled >= self._slot_bytes:
            self._write_out(self._filled // self._slot_bytes * self._slot_bytes)
        filled, total = self._filled, self._filled + num_bytes
        num_written = total // self._slot_bytes * self._slot_bytes
        lead = self._buffer[: filled if num_written else 0]
        tail = self._buffer[: total - num_written] if num_written else self._buffer[filled:total]
        run, begin = self.entry.run, self._begin
        digests = self.owner.on_disk(
            self.entry, self._segment.write_runs, run, begin, lead, runs, stretch_bytes, tail, num_threads
        )
        self._begin, self._filled = self._begin + num_written, total - num_written
        self._end += num_bytes
        return digests

    def piece(self, begin: int, end: int) -> memoryview:
        self._check_next(begin, end)
        if self._filled >= WRITE_BYTES or self._filled + end - begin > len(self._buffer):
            self._write_out(self._whole_bytes())
            self._lengthen(end - begin)
        view = self._buffer[self._filled : self._filled + end - begin]
        self._filled += end - begin
        self._end = end
        return view

    def check_whole(self) -> None:
        """Raise ValueError if pieces are missing."""
        if self._end != self.num_bytes:
            raise ValueError(f"a record must be written to its end, {self._end} of {self.num_bytes} bytes are")

    def finish(self) -> None:
        """Write the rest, its last slot filled up with zeros. Raises TierError."""
        end = -(-self._filled // self._slot_bytes) * self._slot_bytes
        self._lengthen(end - self._filled)
        self._buffer[self._filled : end] = bytes(end - self._filled)
        self._write_out(end)

    def close(self) -> None:
        if self.is_open:
            self._give_buffer()
            self.owner.give_up(self.entry)

    def leave(self) -> None:
        """Close a writer whose record was committed."""
        self._give_buffer()
        self.owner.let_go(self.entry)

    def _give_buffer(self) -> None:
        self.is_open = False
        self.owner.buffers.give(self._buffer)
        del self._buffer

    def _check_next(self, begin: int, end: int) -> None:
        if not self.is_open:
            raise ValueError("a writer must not be closed, this one is")
        if not self._end == begin <= end <= self.num_bytes:
            raise ValueError(f"a piece must begin at {self._end} and end by {self.num_bytes}, got [{begin}, {end}]")

    def _whole_bytes(self) -> int:
        """Return how many of the filled bytes are whole slots, up to a cut of the file if one is among them."""
        if CUT_BYTES % self._slot_bytes == 0:
            offset = self.entry.run.slot * self._slot_bytes + self._begin
            to_cut = (offset + self._filled) // CUT_BYTES * CUT_BYTES - offset
            if to_cut > 0:
                return to_cut
        return self._filled // self._slot_bytes * self._slot_bytes

    def _write_out(self, num_bytes: int) -> None:
        """Write whole slots, and move the bytes after them to the front. A TierError leaves all as it was."""
        data, run = self._buffer[:num_bytes], self.entry.run
        self.owner.on_disk(self.entry, self._segment.write, run, self._begin, data)
        num_left = max(self._filled - num_bytes, 0)
        self._buffer[:num_left] = self._buffer[num_bytes : num_bytes + num_left]
        self._begin, self._filled = self._begin + num_bytes, num_left

    def _lengthen(self, num_bytes: int) -> None:
        """Take a longer buffer if this one is too short for `num_bytes` after the filled bytes."""
        if self._filled + num_bytes > len(self._buffer):
            buffer = new_buffer(self._filled + num_bytes)
            buffer[: self._filled] = self._buffer[: self._filled]
            self.owner.buffers.give(self._buffer)
            self._buffer = buffer

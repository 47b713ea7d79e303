"""Readers and writers of the disk tier, and the buffers between them and the disk.

    write   [ free header | piece 0 | piece 1 |.....]  ─►  whole slots to the disk, the rest to the front, and on
            [ free header | piece 0 ] and the runs     ─►  likewise, from where they lie
    commit  [ record header ]                              over the free one, after all else
    read    disk ─► [ piece ]

Buffers are small enough for a core to keep what is filled, hashed and written in turn, and large enough that few calls
are made. They begin at a page, and what is written begins and ends at a slot: no page is read only to be written.
"""

import mmap
from collections.abc import Callable
from typing import Protocol

import numpy as np

from kvpage.store.disk.segment import HEADER_BYTES, Run
from kvpage.store.disk.space import Entry
from kvpage.store.tiers.stretches import Runs
from kvpage.store.tiers.tier import Reader, TierError, Writer

STAGING_BYTES = (2 << 20) + (1 << 16)  # pieces of 1 MiB, and what is left of the one before
MAX_KEPT = 16


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
    """Memory of its own, which begins at a page; no file is behind it. TierError if there is none."""
    try:
        return memoryview(mmap.mmap(-1, num_bytes))
    except OSError as error:
        raise TierError(f"no memory for a buffer of {num_bytes} bytes: {error.strerror}") from error


class Owner(Protocol):
    """What readers and writers need of their tier."""

    buffers: Buffers

    def on_disk(self, entry: Entry, call: Callable[[], object]) -> None:
        """TierError for the disk's trouble, and when the tier is closed."""

    def let_go(self, entry: Entry) -> None:
        """One user less."""

    def give_up(self, entry: Entry) -> None:
        """One user less, of a record that was not committed: its room is free."""


class DiskReader(Reader):
    def __init__(self, owner: Owner, entry: Entry) -> None:
        self.num_bytes = entry.run.num_bytes
        self._owner, self._entry = owner, entry
        self._buffer: memoryview | None = None
        self._is_open = True

    def piece(self, begin: int, end: int) -> memoryview:
        if not self._is_open:
            raise ValueError("a reader must not be closed, this one is")
        if not 0 <= begin <= end <= self.num_bytes:
            raise ValueError(f"a piece must lie in [0, {self.num_bytes}], got [{begin}, {end}]")
        if self._buffer is None:
            self._buffer = self._owner.buffers.take()
        if len(self._buffer) < end - begin:
            self._owner.buffers.give(self._buffer)
            self._buffer = new_buffer(end - begin)
        view, entry = self._buffer[: end - begin], self._entry
        self._owner.on_disk(entry, lambda: entry.space.segment.read(entry.run, HEADER_BYTES + begin, view))
        return view

    def rest(self) -> None:
        if self._buffer is not None:
            self._owner.buffers.give(self._buffer)
            self._buffer = None

    def is_there(self) -> bool:
        """Whether the header on the disk is still the record's. TierError."""
        found, entry = bytearray(HEADER_BYTES), self._entry
        self._owner.on_disk(entry, lambda: entry.space.segment.read(entry.run, 0, memoryview(found)))
        return found == entry.space.segment.header(entry.run)

    def close(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        self.rest()
        self._owner.let_go(self._entry)


class DiskWriter(Writer):
    """entry: a run with the record's key and length, whose header on the disk is a free one. buffer: one of the
    owner's, which goes back to it.
    """

    takes_runs = True

    def __init__(self, owner: Owner, entry: Entry, buffer: memoryview) -> None:
        self.entry = entry
        self.key, self.num_bytes = entry.key, entry.run.num_bytes
        self.is_open = True
        self.owner = owner
        self._end = 0  # of the pieces
        self._buffer = buffer
        self._begin = 0  # of the buffer, in the run
        self._filled = HEADER_BYTES  # of the buffer
        segment, run = entry.space.segment, entry.run
        self._buffer[:HEADER_BYTES] = segment.header(Run(run.slot, run.num_slots))

    def write_runs(self, runs: Runs, stretch_bytes: int, num_threads: int) -> bytes:
        num_bytes = int(np.add.reduce(runs[:, 1]))
        self._check_next(self._end, self._end + num_bytes)
        if self._filled >= self._slot_bytes:
            self._write_out(self._filled // self._slot_bytes * self._slot_bytes)
        filled, total = self._filled, self._filled + num_bytes
        num_written = total // self._slot_bytes * self._slot_bytes
        lead = self._buffer[: filled if num_written else 0]
        tail = self._buffer[: total - num_written] if num_written else self._buffer[filled:total]
        entry, digests = self.entry, []
        place = entry.run, self._begin, lead, runs, stretch_bytes, tail, num_threads
        self.owner.on_disk(entry, lambda: digests.append(entry.space.segment.write_runs(*place)))
        self._begin, self._filled = self._begin + num_written, total - num_written
        self._end += num_bytes
        return digests[0]

    def piece(self, begin: int, end: int) -> memoryview:
        self._check_next(begin, end)
        if self._filled + end - begin > len(self._buffer):
            self._write_out(self._filled // self._slot_bytes * self._slot_bytes)
            self._reserve(end - begin)
        view = self._buffer[self._filled : self._filled + end - begin]
        self._filled += end - begin
        self._end = end
        return view

    def check_whole(self) -> None:
        """ValueError if pieces are missing."""
        if self._end != self.num_bytes:
            raise ValueError(f"a record must be written to its end, {self._end} of {self.num_bytes} bytes are")

    def finish(self) -> None:
        """Writes what is left, its last slot filled up with zeros. TierError."""
        end = -(-self._filled // self._slot_bytes) * self._slot_bytes
        self._reserve(end - self._filled)
        self._buffer[self._filled : end] = bytes(end - self._filled)
        self._write_out(end)

    def close(self) -> None:
        if self.is_open:
            self._end_with(self.owner.give_up)

    def leave(self) -> None:
        """After it was committed."""
        self._end_with(self.owner.let_go)

    def _end_with(self, end: Callable[[Entry], None]) -> None:
        self.is_open = False
        self.owner.buffers.give(self._buffer)
        del self._buffer
        end(self.entry)

    @property
    def _slot_bytes(self) -> int:
        return self.entry.space.segment.slot_bytes

    def _check_next(self, begin: int, end: int) -> None:
        if not self.is_open:
            raise ValueError("a writer must not be closed, this one is")
        if not self._end == begin <= end <= self.num_bytes:
            raise ValueError(f"a piece must begin at {self._end} and end by {self.num_bytes}, got [{begin}, {end}]")

    def _write_out(self, num_bytes: int) -> None:
        """Whole slots; what is behind them moves to the front. After a TierError all is as it was."""
        data, entry = self._buffer[:num_bytes], self.entry
        self.owner.on_disk(entry, lambda: entry.space.segment.write(entry.run, self._begin, data))
        rest = max(self._filled - num_bytes, 0)
        self._buffer[:rest] = self._buffer[num_bytes : num_bytes + rest]
        self._begin, self._filled = self._begin + num_bytes, rest

    def _reserve(self, num_bytes: int) -> None:
        """A longer buffer, if this one is too short for so many bytes behind what is filled."""
        if self._filled + num_bytes > len(self._buffer):
            buffer = new_buffer(self._filled + num_bytes)
            buffer[: self._filled] = self._buffer[: self._filled]
            self.owner.buffers.give(self._buffer)
            self._buffer = buffer

"""SealedWriter: takes a record in pieces, and writes it sealed, frame by frame."""

from collections.abc import Iterator

import numpy as np

from kvpage.store.disk.reader_writer import Buffers, new_buffer
from kvpage.store.records.record import RecordHead
from kvpage.store.records.record_io import checksum_of
from kvpage.store.sealed.seal_keys import SealKeys
from kvpage.store.sealed.sealed_record import (
    FRAME_BYTES,
    MAX_LEAD_BYTES,
    TAG_BYTES,
    FrameCipher,
    new_note,
)
from kvpage.store.tiers.stretches import Runs, cut_runs, gather_stretches, memory_at
from kvpage.store.tiers.tier import Tier, TierError, Writer

AT_ONCE = 2  # frames of a piece of the tier's: a disk tier writes as many bytes at once


class SealedWriter(Writer):
    """A record on its way into a tier. Each frame is sealed once: after an error the writer takes no more.

    Args:
        owner: the tier that made it.
        writer: of the sealed record.
        num_bytes: of the plain record.
        keys: the first one seals.
        buffers: memory for pieces, which goes back there.
    """

    takes_runs = True

    def __init__(self, owner: Tier, writer: Writer, num_bytes: int, keys: SealKeys, buffers: Buffers) -> None:
        self.owner, self.key, self.num_bytes = owner, writer.key, num_bytes
        self._writer, self._keys, self._buffers = writer, keys, buffers
        self._buffer: memoryview | None = buffers.take()
        self._filled, self._end = 0, 0  # bytes in the buffer, and of all pieces
        self._cipher: FrameCipher | None = None
        self._head: RecordHead | None = None
        self._header = b""
        self._lead = b""
        self._body_left = 0  # bytes of the frames to come
        self._next, self._at = 1, 0  # number of the next frame, and its place in the sealed record
        self._is_broken = False

    def write_runs(self, runs: Runs, stretch_bytes: int, num_threads: int) -> None:
        """As of Writer: each frame's seal is proof. A frame within one run is sealed from there, without a copy."""
        num_bytes = int(runs[:, 1].sum())
        self._check_next(self._end, self._end + num_bytes)
        self._seal_whole_frames()
        self._is_broken = True  # until all went well
        if self._cipher is None:
            self._begin(b"")
        for frames in self._frames_of(runs, num_bytes):
            self._seal_frames(frames)
        self._end, self._is_broken = self._end + num_bytes, False

    def piece(self, begin: int, end: int) -> memoryview:
        self._check_next(begin, end)
        self._seal_whole_frames()
        buffer = self._lengthened(end - begin)
        view = buffer[self._filled : self._filled + end - begin]
        self._filled, self._end = self._filled + end - begin, end
        return view

    def check_whole(self) -> None:
        """Raise ValueError if pieces are missing, or if the writer is closed."""
        if self._buffer is None or self._end != self.num_bytes:
            raise ValueError(f"a writer must be open and filled to {self.num_bytes} bytes, got {self._end}")

    def finished(self) -> Writer:
        """Seal the rest, and return the writer of the sealed record, filled to its end. Raises TierError."""
        self._seal_whole_frames()
        head, left = self._head, self._body_left
        assert head is not None and self._cipher is not None and self._buffer is not None, "a whole record has a lead"
        self._is_broken = True  # all is sealed, or nothing more is
        if left:
            self._seal_frames(self._buffer[:left])
        ends = self._lead + self._buffer[left : self._filled]
        rest = self._writer.piece(self._at, head.payload_end)
        self._cipher.seal(0, memoryview(ends), rest[: len(ends) + TAG_BYTES])
        rest[len(ends) + TAG_BYTES :] = bytes(len(rest) - len(ends) - TAG_BYTES)
        table = bytes(head.num_digest_bytes)
        self._writer.piece(head.payload_end, head.num_bytes)[:] = table + checksum_of(self._header, table)
        return self._writer

    def close(self) -> None:
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            self._buffers.give(buffer)
            self._writer.close()

    # --- inside ---

    def _check_next(self, begin: int, end: int) -> None:
        if self._buffer is None:
            raise ValueError("the writer must be open, got a closed one")
        if begin != self._end or not begin <= end <= self.num_bytes:
            raise ValueError(f"begin must be {self._end} and end at most {self.num_bytes}, got {begin}, {end}")

    def _frames_of(self, runs: Runs, num_bytes: int) -> Iterator[memoryview]:
        """Walk over the frames of what is filled and of the runs, a few at once. The rest is filled then."""
        if len(runs) > 1 and int(np.maximum.reduce(runs[:, 1])) < FRAME_BYTES:
            yield from self._gathered(runs, num_bytes)
            return
        for address, size in runs.tolist():
            memory, at = memory_at(address, size), 0
            while at < size:
                num_there = 0 if self._filled else self._frame_bytes(size - at)
                part = memory[at : at + (num_there or FRAME_BYTES - self._filled)]
                at += len(part)
                if num_there:
                    yield part
                else:
                    self._room(len(part))[:] = part
                    yield from self._filled_frame()

    def _frame_bytes(self, num_bytes: int) -> int:
        """Return how many of the next bytes are frames: a few whole ones, or the last one, which is short."""
        num_whole = min(num_bytes // FRAME_BYTES, AT_ONCE) * FRAME_BYTES
        return num_whole or (self._body_left if self._body_left <= num_bytes else 0)

    def _gathered(self, runs: Runs, num_bytes: int) -> Iterator[memoryview]:
        """As `_frames_of`, of short runs."""
        ends, at = np.cumsum(runs[:, 1]), 0
        while at < num_bytes:
            size = min(FRAME_BYTES - self._filled, num_bytes - at)
            cut, at = cut_runs(runs, ends, at, at + size), at + size
            gather_stretches(cut, self._room(size), size, 1, streaming=False)
            yield from self._filled_frame()

    def _room(self, num_bytes: int) -> memoryview:
        """Return the next bytes of the buffer, which are filled before anything else happens."""
        assert self._buffer is not None
        self._filled += num_bytes
        return self._buffer[self._filled - num_bytes : self._filled]

    def _filled_frame(self) -> Iterator[memoryview]:
        """Yield the buffer's frame if it is whole, and empty the buffer then."""
        if self._filled == FRAME_BYTES and self._buffer is not None:
            yield self._buffer[:FRAME_BYTES]
            self._filled = 0

    def _seal_whole_frames(self) -> None:
        """Seal all that is filled, but for the bytes after the last whole frame."""
        if self._is_broken:
            raise TierError("a record whose sealing failed is not continued")
        if not self._filled or self._buffer is None:
            return
        self._is_broken = True  # until all went well
        begin = 0 if self._cipher else self._begin(bytes(self._buffer[: min(self._filled, MAX_LEAD_BYTES)]))
        while self._filled - begin >= FRAME_BYTES:
            self._seal_frames(self._buffer[begin : begin + FRAME_BYTES])
            begin += FRAME_BYTES
        left = self._filled - begin
        self._buffer[:left] = self._buffer[begin : self._filled]
        self._filled, self._is_broken = left, False

    def _begin(self, lead: bytes) -> int:
        """Begin the sealed record, and keep the lead, which is sealed with the trail. Return the lead's bytes."""
        note = new_note(self._keys.ids[0], self.num_bytes, len(lead))
        self._head = note.head(self.key)
        self._header = self._head.pack()
        self._cipher = FrameCipher(self._keys, note.key_id, self._header)
        self._lead, self._body_left, self._at = lead, note.body_bytes, self._head.payload_begin
        self._writer.piece(0, self._at)[:] = self._header
        return len(lead)

    def _seal_frames(self, frames: memoryview) -> None:
        """Seal frames into the tier: whole ones, or the last one."""
        assert self._cipher is not None and (len(frames) % FRAME_BYTES == 0 or len(frames) == self._body_left)
        num_frames = -(-len(frames) // FRAME_BYTES)
        end = self._at + len(frames) + num_frames * TAG_BYTES
        self._cipher.seal(self._next, frames, self._writer.piece(self._at, end))
        self._next, self._at, self._body_left = self._next + num_frames, end, self._body_left - len(frames)

    def _lengthened(self, num_bytes: int) -> memoryview:
        """Return the buffer, with room for so many bytes after those that are filled."""
        assert self._buffer is not None
        if self._filled + num_bytes > len(self._buffer):
            longer = new_buffer(self._filled + num_bytes)
            longer[: self._filled] = self._buffer[: self._filled]
            self._buffers.give(self._buffer)
            self._buffer = longer
        return self._buffer

"""SealedWriter: takes a record in pieces, and writes it sealed, frame by frame."""

from collections.abc import Iterator

import numpy as np

from kvpage.store.disk.reader_writer import Buffers, new_buffer
from kvpage.store.records.record import RecordHead
from kvpage.store.records.record_io import checksum_of
from kvpage.store.sealed.seal_keys import SealKeys
from kvpage.store.sealed.sealed_record import (
    FRAME_BYTES,
    SEALED_FRAME,
    TAG_BYTES,
    FrameCipher,
    new_note,
)
from kvpage.store.tiers.stretches import Runs, cut_runs, gather_stretches, memory_at
from kvpage.store.tiers.tier import Tier, TierError, Writer

AT_ONCE = 4  # frames of a piece of the tier's: a disk tier writes as many bytes at once


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
        self._lead = b""  # sealed
        self._next, self._at = 1, 0  # number of the next frame, and its place in the sealed record
        self._is_broken = False

    def write_runs(self, runs: Runs, stretch_bytes: int, num_threads: int) -> None:
        """As of Writer: each frame's seal is proof. A frame within one run is sealed from there, without a copy."""
        num_bytes = int(runs[:, 1].sum())
        self._check_next(self._end, self._end + num_bytes)
        self._seal_whole_frames()
        self._is_broken = True  # until all went well
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
        head, end = self._head, 0
        assert head is not None and self._buffer is not None, "a whole record has a lead"
        rest = self._writer.piece(self._at, head.payload_end)
        if self._filled:
            end = self._filled + TAG_BYTES
            self._seal(self._buffer[: self._filled], rest[:end])
        rest[end:] = self._lead.ljust(len(rest) - end, b"\0")
        table = bytes(head.num_digest_bytes)
        self._writer.piece(head.payload_end, head.num_bytes)[:] = table + checksum_of(self._header, table)
        self._is_broken = True  # all is sealed
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
        """Walk over the whole frames of what is filled and of the runs, a few at once. The rest is filled then."""
        if int(np.maximum.reduce(runs[:, 1], initial=0)) < FRAME_BYTES:
            yield from self._gathered(runs, num_bytes)
            return
        for address, size in runs.tolist():
            memory, at = memory_at(address, size), 0
            while at < size:
                num_whole = 0 if self._filled else min((size - at) // FRAME_BYTES, AT_ONCE)
                part = memory[at : at + (num_whole * FRAME_BYTES or FRAME_BYTES - self._filled)]
                at += len(part)
                if num_whole:
                    yield part
                else:
                    self._room(len(part))[:] = part
                    yield from self._filled_frame()

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
        begin = 0 if self._cipher else self._seal_lead(self._buffer[: min(self._filled, FRAME_BYTES)])
        while self._filled - begin >= FRAME_BYTES:
            self._seal_frames(self._buffer[begin : begin + FRAME_BYTES])
            begin += FRAME_BYTES
        left = self._filled - begin
        self._buffer[:left] = self._buffer[begin : self._filled]
        self._filled, self._is_broken = left, False

    def _seal_lead(self, lead: memoryview) -> int:
        """Begin the sealed record, and seal its frame 0, to be written last. Return the bytes of the frame."""
        note = new_note(self._keys.ids[0], self.num_bytes, len(lead))
        self._head = note.head(self.key)
        self._header = self._head.pack()
        self._cipher = FrameCipher(self._keys, note.key_id, self._header)
        sealed = bytearray(len(lead) + TAG_BYTES)
        self._cipher.seal(0, lead, memoryview(sealed))
        self._lead, self._at = bytes(sealed), self._head.payload_begin
        self._writer.piece(0, self._head.payload_begin)[:] = self._header
        return len(lead)

    def _seal_frames(self, frames: memoryview) -> None:
        """Seal whole frames into the tier. The first one of the record becomes the lead."""
        if self._cipher is None:
            frames = frames[self._seal_lead(frames[:FRAME_BYTES]) :]
        num_bytes = len(frames) // FRAME_BYTES * SEALED_FRAME
        if num_bytes:
            self._seal(frames, self._writer.piece(self._at, self._at + num_bytes))
            self._at += num_bytes

    def _seal(self, data: memoryview, to: memoryview) -> None:
        """Seal whole frames, or a short one."""
        assert self._cipher is not None, "the lead comes first"
        self._cipher.seal(self._next, data, to)
        self._next += max(len(data) // FRAME_BYTES, 1)

    def _lengthened(self, num_bytes: int) -> memoryview:
        """Return the buffer, with room for so many bytes after those that are filled."""
        assert self._buffer is not None
        if self._filled + num_bytes > len(self._buffer):
            longer = new_buffer(self._filled + num_bytes)
            longer[: self._filled] = self._buffer[: self._filled]
            self._buffers.give(self._buffer)
            self._buffer = longer
        return self._buffer

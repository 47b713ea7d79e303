"""SealedReader: a sealed record, opened frame by frame as its pieces are asked for."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kvpage.store.disk.reader_writer import STAGING_BYTES, Buffers, new_buffer
from kvpage.store.records.record import CHECKSUM_BYTES, CorruptRecord, RecordHead, UnreadableRecord, is_sealed
from kvpage.store.records.record_io import PIECE_BYTES, check_table, read_head
from kvpage.store.sealed.seal_keys import SealKeys
from kvpage.store.sealed.sealed_record import (
    FRAME_BYTES,
    KEY_AT,
    MAX_HEAD_BYTES,
    SEALED_FRAME,
    TAG_BYTES,
    FrameCipher,
    SealNote,
    form_of,
)
from kvpage.store.tiers.stretches import Runs, cut_runs, memory_at, scatter_stretches
from kvpage.store.tiers.tier import Key, Reader

AT_ONCE = 8  # frames of a call of the tier: Python that runs seldom runs slowly, between bytes that fill the cache
SHORT_BYTES = 5 * SEALED_FRAME  # of a sealed record that one call of the tier reads
assert AT_ONCE * SEALED_FRAME <= STAGING_BYTES


class _Opened(NamedTuple):
    """The record, after its head was read. lead: the plain bytes of frame 0."""

    head: RecordHead
    note: SealNote
    cipher: FrameCipher
    lead: bytes


class SealedReader(Reader):
    """A plain record out of a sealed one. Nothing is read before it is asked for.

    `num_bytes` and `piece` raise CorruptRecord for a record that is not sealed, not the key's, or whose seal is broken;
    UnreadableRecord for one whose key is not here.

    Args:
        reader: of the sealed record. This one owns it.
        key: of the record.
        keys: the secrets.
        buffers: memory for pieces, which goes back there.
        lock_out: called with the key if the record's secret is not here.
    """

    takes_runs = has_proved = True

    def __init__(
        self, reader: Reader, key: Key, keys: SealKeys, buffers: Buffers, lock_out: Callable[[Key], None]
    ) -> None:
        self._reader, self._key, self._keys, self._lock_out = reader, key, keys, lock_out
        self._buffers = buffers
        self._buffer: memoryview | None = None
        self._short: memoryview | None = None
        self._opened: _Opened | None = None
        self._first, self._last = 0, 0  # of the frames in the buffer, the one after the last
        self._is_open = True

    @property
    def num_bytes(self) -> int:  # type: ignore[override]  # of a record that is not read before
        return self._record.note.plain_bytes

    def piece(self, begin: int, end: int) -> memoryview:
        record = self._record
        if not 0 <= begin <= end <= record.note.plain_bytes:
            raise ValueError(f"a piece must be in [0, {record.note.plain_bytes}], got [{begin}, {end}]")
        num_lead = len(record.lead)
        if end <= num_lead:
            return memoryview(record.lead)[begin:end]
        if begin >= num_lead:
            return self._body(begin - num_lead, end - num_lead).toreadonly()
        return memoryview(record.lead[begin:] + self._body(0, end - num_lead).tobytes())

    def read_runs(self, begin: int, runs: Runs, stretch_bytes: int, num_threads: int) -> None:
        """As of Reader: each frame's seal is proof. A frame within one run is opened there, others in a piece."""
        if len(runs) > 1 and int(np.maximum.reduce(runs[:, 1])) < FRAME_BYTES:
            self._open_pieces(begin, runs, num_threads)
            return
        for address, size in runs.tolist():
            if address:
                self._open_run(begin, memory_at(address, size))
            begin += size

    def release_piece(self) -> None:
        buffer, self._buffer = self._buffer, None
        self._first = self._last = 0
        if buffer is not None:
            self._buffers.give(buffer)
        self._short = None
        self._reader.release_piece()

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self.release_piece()
            self._reader.close()

    # --- inside ---

    @property
    def _record(self) -> _Opened:
        if not self._is_open:
            raise ValueError("the reader must be open, got a closed one")
        if self._opened is None:
            self._opened = self._open()
        return self._opened

    def _open(self) -> _Opened:
        """Read both ends: the header, and all from the last frame on, which has the record's digests."""
        num_bytes = self._reader.num_bytes
        header = bytes(self._sealed(0, min(MAX_HEAD_BYTES, num_bytes)))
        if not is_sealed(header):
            SealNote.of(self._plain_head())
        (head, note), header = form_of(header, num_bytes)
        if header[KEY_AT] != self._key:
            raise CorruptRecord("the record is another one", "foreign")
        last = (note.plain_bytes - note.lead_bytes - 1) // FRAME_BYTES * SEALED_FRAME if note.body_bytes else 0
        tail = self._sealed(head.payload_begin + last, num_bytes)
        check_table(header, tail[head.payload_end - num_bytes :])
        try:
            cipher = FrameCipher(self._keys, note.key_id, header)
        except UnreadableRecord:
            self._lock_out(self._key)
            raise
        return _Opened(head, note, cipher, self._opened_ends(note, cipher, tail))

    def _plain_head(self) -> RecordHead:
        self._short = None  # whatever is read next takes its memory
        return read_head(self._reader)[0]

    def _sealed(self, begin: int, end: int) -> memoryview:
        """Return bytes of the sealed record, valid until the next call. A short one is read whole when it is opened."""
        if self._opened is None and self._short is None and self._reader.num_bytes <= SHORT_BYTES:
            self._short = self._reader.piece(0, self._reader.num_bytes)
        return self._reader.piece(begin, end) if self._short is None else self._short[begin:end]

    def _opened_ends(self, note: SealNote, cipher: FrameCipher, tail: memoryview) -> bytes:
        """Open the lead, and the last frame into the buffer. Return the lead. tail: from the last frame on."""
        size = note.body_bytes % SEALED_FRAME or min(note.body_bytes, SEALED_FRAME)
        lead = bytearray(note.lead_bytes)
        end = size + len(lead) + TAG_BYTES
        if bytes(tail[end:-CHECKSUM_BYTES]).strip(b"\0"):
            raise CorruptRecord("the zeros after a sealed record's frames are others", "seal")
        cipher.open(0, tail[size:end], memoryview(lead))
        if size:
            self._buffer, last = self._buffer or self._buffers.take(), (note.body_bytes - 1) // SEALED_FRAME
            cipher.open(1 + last, tail[:size], self._buffer[: size - TAG_BYTES])
            self._first, self._last = last, last + 1
        return bytes(lead)

    def _open_pieces(self, begin: int, runs: Runs, num_threads: int) -> None:
        """Open short runs by way of pieces."""
        ends = np.cumsum(runs[:, 1])
        for at in range(0, int(ends[-1]) if len(ends) else 0, PIECE_BYTES):
            end = min(at + PIECE_BYTES, int(ends[-1]))
            piece = self.piece(begin + at, begin + end)
            scatter_stretches(piece, cut_runs(runs, ends, at, end), len(piece), num_threads, streaming=False)

    def _open_run(self, begin: int, memory: memoryview) -> None:
        """Open the record's bytes from `begin` on: whole frames where they go, the ends by way of a piece."""
        offset = begin - len(self._record.lead)
        first = min(-offset % FRAME_BYTES, len(memory))
        last = first + (len(memory) - first) // FRAME_BYTES * FRAME_BYTES
        if first:
            memory[:first] = self.piece(begin, begin + first)
        if first < last:
            self._open_whole((offset + first) // FRAME_BYTES, memory[first:last])
        if last < len(memory):
            memory[last:] = self.piece(begin + last, begin + len(memory))

    def _open_whole(self, frame: int, memory: memoryview) -> None:
        """Open whole frames after the lead."""
        head, cipher = self._record.head, self._record.cipher
        for at in range(0, len(memory), AT_ONCE * FRAME_BYTES):
            to = memory[at : at + AT_ONCE * FRAME_BYTES]
            begin, count = head.payload_begin + frame * SEALED_FRAME, len(to) // FRAME_BYTES
            assert begin + count * SEALED_FRAME <= head.payload_end
            cipher.open(1 + frame, self._sealed(begin, begin + count * SEALED_FRAME), to)
            frame += count

    def _body(self, begin: int, end: int) -> memoryview:
        """Return bytes after the lead. The last frame of the piece before is opened once for both."""
        first, last = begin // FRAME_BYTES, max(-(-end // FRAME_BYTES), begin // FRAME_BYTES)
        if not self._first <= first <= last <= self._last:
            self._load(first, last)
        assert self._buffer is not None or first == last
        at = begin - self._first * FRAME_BYTES
        return memoryview(b"") if self._buffer is None else self._buffer[at : at + end - begin]

    def _load(self, first: int, last: int) -> None:
        """Open the frames [first, last) into the buffer."""
        buffer = self._buffer or self._buffers.take()
        self._buffer = buffer
        is_next = self._first <= first < self._last <= last  # of the frames there, some are needed
        num_there = self._last - first if is_next else 0
        if num_there:
            begin = (first - self._first) * FRAME_BYTES
            buffer[: num_there * FRAME_BYTES] = buffer[begin : begin + num_there * FRAME_BYTES]
        if (last - first) * FRAME_BYTES > len(buffer):
            self._buffer = new_buffer((last - first) * FRAME_BYTES)
            self._buffer[: num_there * FRAME_BYTES] = buffer[: num_there * FRAME_BYTES]
            self._buffers.give(buffer)
        self._first = self._last = 0  # until all are there
        self._open_frames(first, first + num_there, last)
        self._first, self._last = first, last

    def _open_frames(self, first: int, begin: int, end: int) -> None:
        """Open the frames [begin, end) into the buffer, whose first frame is `first`."""
        note, buffer = self._record.note, self._buffer
        assert buffer is not None
        num_plain = note.plain_bytes - note.lead_bytes
        for frame in range(begin, end):
            to, size = (frame - first) * FRAME_BYTES, min(FRAME_BYTES, num_plain - frame * FRAME_BYTES)
            self._open_frame(frame, buffer[to : to + size])

    def _open_frame(self, frame: int, to: memoryview) -> None:
        """Open a frame after the lead. One at a time, a core's cache keeps it from the file to the end."""
        head, begin = self._record.head, self._record.head.payload_begin + frame * SEALED_FRAME
        assert begin + len(to) + TAG_BYTES <= head.payload_end
        self._record.cipher.open(1 + frame, self._sealed(begin, begin + len(to) + TAG_BYTES), to)

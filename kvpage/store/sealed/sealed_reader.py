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
    SealedForm,
    SealNote,
    form_of,
)
from kvpage.store.tiers.stretches import Runs, cut_runs, memory_at, scatter_stretches
from kvpage.store.tiers.tier import Key, Reader

AT_ONCE = 2  # frames of a call of the tier: Python that runs seldom runs slowly, between bytes that fill the cache
SHORT_BYTES = 5 << 18  # of a sealed record that one call of the tier reads
assert AT_ONCE * SEALED_FRAME <= STAGING_BYTES


class _Opened(NamedTuple):
    """The record, after its head was read. ends: the plain bytes of frame 0: the lead, and after it the trail."""

    form: SealedForm
    cipher: FrameCipher
    ends: memoryview


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
        return (self._opened or self._open()).form.plain_bytes

    def piece(self, begin: int, end: int) -> memoryview:
        form, _, ends = self._opened or self._open()
        if not 0 <= begin <= end <= form.plain_bytes:
            raise ValueError(f"a piece must be in [0, {form.plain_bytes}], got [{begin}, {end}]")
        lead, body_end = form.lead_bytes, form.body_end
        if end <= lead:
            return ends[begin:end]
        if begin >= body_end:
            return ends[begin - body_end + lead : end - body_end + lead]
        body = self._body(max(begin - lead, 0), min(end, body_end) - lead).toreadonly()
        if lead <= begin and end <= body_end:
            return body
        return memoryview(b"".join((ends[begin:lead], body, ends[lead : max(end - body_end, 0) + lead])))

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
            self._is_open, self._opened = False, None
            self.release_piece()
            self._reader.close()

    # --- inside ---

    def _open(self) -> _Opened:
        """Read both ends, the header and frame 0 with all after it, and open frame 0."""
        if not self._is_open:
            raise ValueError("the reader must be open, got a closed one")
        num_bytes = self._reader.num_bytes
        if num_bytes <= SHORT_BYTES and self._short is None:
            self._short = self._reader.piece(0, num_bytes)
        first = bytes(self._sealed(0, min(MAX_HEAD_BYTES, num_bytes)))
        if not is_sealed(first):
            SealNote.of(self._plain_head())
        form, header = form_of(first, num_bytes)
        if header[KEY_AT] != self._key:
            raise CorruptRecord("the record is another one", "foreign")
        tail = self._sealed(form.frame_0, num_bytes)
        zeros = bytes(tail[form.zeros - form.frame_0 :])
        check_table(header, zeros[form.table - form.zeros :])
        try:
            cipher = FrameCipher(self._keys, form.key_id, header)
        except UnreadableRecord:
            self._lock_out(self._key)
            raise
        if zeros[:-CHECKSUM_BYTES].strip(b"\0"):
            raise CorruptRecord("the bytes after a sealed record's frames must be zeros", "seal")
        ends = bytearray(form.zeros - form.frame_0 - TAG_BYTES)
        cipher.open(0, tail[: len(ends) + TAG_BYTES], memoryview(ends))
        self._opened = _Opened(form, cipher, memoryview(ends).toreadonly())
        return self._opened

    def _plain_head(self) -> RecordHead:
        self._short = None  # whatever is read next takes its memory
        return read_head(self._reader)[0]

    def _sealed(self, begin: int, end: int) -> memoryview:
        """Return bytes of the sealed record, valid until the next call. A short one is read whole when it is opened."""
        return self._reader.piece(begin, end) if self._short is None else self._short[begin:end]

    def _open_pieces(self, begin: int, runs: Runs, num_threads: int) -> None:
        """Open short runs by way of pieces."""
        ends = np.cumsum(runs[:, 1])
        for at in range(0, int(ends[-1]) if len(ends) else 0, PIECE_BYTES):
            end = min(at + PIECE_BYTES, int(ends[-1]))
            piece = self.piece(begin + at, begin + end)
            cut = runs if len(piece) == ends[-1] else cut_runs(runs, ends, at, end)
            scatter_stretches(piece, cut, len(piece), num_threads, streaming=False)

    def _open_run(self, begin: int, memory: memoryview) -> None:
        """Open the record's bytes from `begin` on: whole frames where they go, the ends by way of a piece."""
        form = (self._opened or self._open()).form
        offset, body_bytes = begin - form.lead_bytes, form.body_end - form.lead_bytes
        first = min(-offset % FRAME_BYTES, len(memory)) if offset >= 0 else min(-offset, len(memory))
        last = min(offset + len(memory), body_bytes)
        if last < body_bytes:
            last = last // FRAME_BYTES * FRAME_BYTES
        last = max(last - offset, first)
        if first:
            memory[:first] = self.piece(begin, begin + first)
        if first < last:
            self._open_frames((offset + first) // FRAME_BYTES, memory[first:last])
        if last < len(memory):
            memory[last:] = self.piece(begin + last, begin + len(memory))

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
        form = (self._opened or self._open()).form
        begin, end = (first + num_there) * FRAME_BYTES, min(last * FRAME_BYTES, form.body_end - form.lead_bytes)
        self._open_frames(
            first + num_there, self._buffer[num_there * FRAME_BYTES : num_there * FRAME_BYTES + end - begin]
        )
        self._first, self._last = first, last

    def _open_frames(self, frame: int, memory: memoryview) -> None:
        """Open frames after the lead, of which the record's last one may be short."""
        form, cipher, _ = self._opened or self._open()
        for at in range(0, len(memory), AT_ONCE * FRAME_BYTES):
            to, begin = memory[at : at + AT_ONCE * FRAME_BYTES], form.payload_begin + frame * SEALED_FRAME
            end = begin + len(to) + -(-len(to) // FRAME_BYTES) * TAG_BYTES
            assert end <= form.frame_0
            cipher.open(1 + frame, self._sealed(begin, end), to)
            frame += AT_ONCE

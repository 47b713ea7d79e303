"""Writing chunks as records and reading them back, piece by piece, each copied and hashed while the CPU caches it.

write   header ─► [ fill piece 0 ─► digests ] ─► [ fill piece 1 ─► digests ] ... ─► digests, checksum
        header ─► [ the runs of memory ─► digests ] ─► digests, checksum               into a file, if they are long
read    header, digests, checksum: is it the record? ─► [ take piece 0 ─► digests right? ] ─► [ take ... ] ...
        header, digests, checksum: is it the record? ─► [ the runs of memory ─► digests right? ]    from a file

A Source writes a payload, and a Sink takes it. A piece is a number of its stretches: in memory all of them, which are
copied once; otherwise as many as a core's cache can keep.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Protocol

import xxhash

from kvpage.store.records.codec import Codec
from kvpage.store.records.kinds import RecordKind, RecordKinds
from kvpage.store.records.record import (
    ALIGNMENT,
    CHECKSUM_BYTES,
    DIGEST_BYTES,
    HEADER,
    MAX_META_BYTES,
    SEALED_CODEC,
    CorruptRecord,
    RecordHead,
    Shape,
    UnreadableRecord,
    is_sealed,
)
from kvpage.store.tiers.stretches import Runs, copy_and_digest, digests_of, runs_of
from kvpage.store.tiers.tier import Reader, Writer

ENCODED_STRETCH_BYTES = 1 << 20  # of payloads that a codec has written


class Source(Protocol):
    """A payload to be written. stretch_bytes: bytes of each of its stretches."""

    stretch_bytes: int

    @property
    def piece_ends(self) -> Sequence[int] | None:
        """The bytes at which pieces may end, ascending; None for each stretch's end."""

    def fill(self, begin: int, buffer: memoryview, num_threads: int, streaming: bool) -> bytes:
        """Write the payload's stretches from the byte `begin` on into the buffer, and return their digests.

        streaming: write past the CPU's cache, since the bytes are not read soon.
        """

    def runs(self) -> Runs | None:
        """Return the memory of the whole payload, valid as long as the source.

        None if it is not in memory, or in runs so short that filling a buffer is better.
        """


class ShapedSource(Source, Protocol):
    """A chunk to be written. shape: of its payload."""

    shape: Shape


class Sink(Protocol):
    """A chunk to be loaded. stretch_bytes: bytes of each stretch of its payload."""

    stretch_bytes: int

    @property
    def piece_ends(self) -> Sequence[int] | None:
        """As of Source."""

    def take(self, begin: int, piece: memoryview, num_threads: int) -> bytes:
        """Take the wanted bytes of the stretches from the byte `begin` on, and return the stretches' digests.

        The bytes count only if the digests are right.
        """

    def runs(self) -> Runs | None:
        """Return the memory that takes the whole payload, valid as long as the sink.

        A run at address 0 stands for bytes that are not wanted. None if taking pieces is better.
        """


class EncodedPayload:
    """The output of a codec, as a source and a sink."""

    stretch_bytes = ENCODED_STRETCH_BYTES
    piece_ends = None

    def __init__(self, payload: memoryview) -> None:
        self.payload = payload

    def fill(self, begin: int, buffer: memoryview, num_threads: int, streaming: bool) -> bytes:
        data = self.payload[begin : begin + len(buffer)]
        return b"".join(
            copy_and_digest(buffer[at : at + self.stretch_bytes], data[at : at + self.stretch_bytes], streaming)
            for at in range(0, len(data), self.stretch_bytes)
        )

    def runs(self) -> Runs | None:
        return runs_of(self.payload)

    def take(self, begin: int, piece: memoryview, num_threads: int) -> bytes:
        digests = digests_of(piece, self.stretch_bytes, num_threads)
        self.payload[begin : begin + len(piece)] = piece
        return digests


class BytesSink:
    """Copies stretches into bytes; with None it only hashes them."""

    piece_ends = None

    def __init__(self, to: memoryview | None, stretch_bytes: int) -> None:
        self._to, self.stretch_bytes = to, stretch_bytes

    def runs(self) -> Runs | None:
        return None

    def take(self, begin: int, piece: memoryview, num_threads: int) -> bytes:
        if self._to is None:
            return digests_of(piece, self.stretch_bytes, num_threads)
        size = self.stretch_bytes
        runs = range(0, len(piece), size)
        return b"".join(copy_and_digest(self._to[at : at + size], piece[at : at + size]) for at in runs)


PIECE_BYTES = 1 << 20
MIN_RUNS_BYTES = 1 << 20  # of payloads that a file's bytes go to directly: in one piece is as good


def encoded(kind: RecordKind, chunk: Source, way: str | None = None) -> tuple[RecordHead, Source]:
    """Return the head of the record that the chunk becomes, and its payload. way: as of RecordKind.written_by."""
    name = kind.written_by(way)
    codec = kind.codecs[name]
    if codec is None:
        return kind.head(kind.raw_bytes, chunk.stretch_bytes, name), chunk
    raw = memoryview(bytearray(kind.raw_bytes))
    chunk.fill(0, raw, 1, streaming=False)
    return _coded(kind, codec, raw)


def recoded(reader: Reader, kind: RecordKind, way: str | None) -> tuple[RecordHead, Source] | None:
    """Return head and payload of a record as a tier with another codec writes it; None where it stays as it is.

    Raises CorruptRecord or UnreadableRecord as `read_record`.
    """
    head, digests = read_head(reader, kind.meta)
    codec, name = check_kind(head, kind), kind.written_by(way)
    to = kind.codecs[name]
    if name == head.codec or to is None:  # how a raw payload was cut into stretches is not known any more
        return None
    if codec is not None:
        return _coded(kind, to, decode(reader, head, digests, codec))
    if head.payload_bytes != head.raw_bytes:
        raise CorruptRecord(f"a payload of {head.payload_bytes} bytes is not {head.raw_bytes} raw ones")
    raw = memoryview(bytearray(head.raw_bytes))
    for begin, end in pieces(head, reader.is_in_memory):
        read_piece(reader, head, digests, begin, end, BytesSink(raw[begin:end], head.stretch_bytes))
    return _coded(kind, to, raw)


def _coded(kind: RecordKind, codec: Codec, raw: memoryview) -> tuple[RecordHead, Source]:
    coded = EncodedPayload(memoryview(codec.encode(raw, kind.shape)).cast("B"))
    return kind.head(len(coded.payload), coded.stretch_bytes, codec.name), coded


def write_record(writer: Writer, head: RecordHead, chunk: Source, num_threads: int = 1) -> None:
    """Write the whole record. Raises TierError."""
    header, digests = head.pack(), []
    writer.piece(0, head.payload_begin)[:] = header
    runs = chunk.runs() if writer.takes_runs else None
    if runs is not None:
        written = writer.write_runs(runs, head.stretch_bytes, num_threads)
        digests.append(bytes(head.num_digest_bytes) if written is None else written)
    for begin, end in pieces(head, writer.is_in_memory, chunk.piece_ends) if runs is None else ():
        piece = writer.piece(head.payload_begin + begin, head.payload_begin + end)
        digests.append(chunk.fill(begin, piece, num_threads, writer.is_in_memory))
    table = b"".join(digests)
    writer.piece(head.payload_end, head.num_bytes)[:] = table + checksum_of(header, table)


def read_head(reader: Reader, meta: bytes | None = None) -> tuple[RecordHead, bytes]:
    """Return the head of a record and its digests, verified by the checksum; no digests if the reader has proved it.

    Raises CorruptRecord if the checksum is wrong, or if the meta is not the one given (None: any). Then also
    UnreadableRecord for a sealed record.
    """
    if reader.num_bytes < HEADER.size + CHECKSUM_BYTES:
        raise CorruptRecord(f"a record of {reader.num_bytes} bytes has no head")
    num_meta = HEADER.unpack_from(reader.piece(0, HEADER.size))[2] if meta is None else len(meta)
    begin = -(-(HEADER.size + num_meta) // ALIGNMENT) * ALIGNMENT
    if num_meta > MAX_META_BYTES or reader.num_bytes < begin + CHECKSUM_BYTES:
        raise CorruptRecord(f"a record of {reader.num_bytes} bytes has no room for its head")
    header = bytes(reader.piece(0, begin))
    if meta is not None and is_sealed(header):
        raise _sealed()
    head = RecordHead.unpack(header, reader.num_bytes)
    if meta is not None and head.meta != meta:
        raise CorruptRecord("the record is of another model, layout or namespace", "foreign")
    if reader.has_proved:
        return head, b""
    table = bytes(reader.piece(head.payload_end, head.num_bytes))
    check_table(header, table)
    return head, table[:-CHECKSUM_BYTES]


def check_table(header: bytes, table: bytes | memoryview) -> None:
    """Raise CorruptRecord unless the table, of the digests and the checksum, is that of the record's header."""
    if checksum_of(header, bytes(table[:-CHECKSUM_BYTES])) != table[-CHECKSUM_BYTES:]:
        raise CorruptRecord("the checksum is wrong")


def checksum_of(header: bytes, digests: bytes) -> bytes:
    """Return the checksum of a record: by the package xxhash, whose calls with few bytes cost less than native ones."""
    return xxhash.xxh3_128_digest(header + digests)


def read_shape(reader: Reader, kinds: RecordKinds, namespace: bytes) -> Shape:
    """Return the shape of the payload, as the record's head states it.

    Raises CorruptRecord for a shape that cannot be, and UnreadableRecord for a codec that is not here.
    """
    return kinds.shape_of(read_head(reader, kinds.keys.meta(namespace))[0])


def check_kind(head: RecordHead, kind: RecordKind) -> Codec | None:
    """Return the codec to read the record with; None for a raw one.

    Raises CorruptRecord if the record is not of this kind; UnreadableRecord if its codec is not here.
    """
    if (head.key, head.shape, head.raw_bytes) != (kind.key, kind.shape, kind.raw_bytes):
        raise CorruptRecord(
            f"a record of {kind.raw_bytes} bytes was asked for, got another one of {head.raw_bytes}", "foreign"
        )
    if head.codec not in kind.codecs:
        raise UnreadableRecord(f"the codec must be one of {', '.join(kind.codecs)}, got {head.codec}")
    return kind.codecs[head.codec]


def read_record(reader: Reader, kind: RecordKind, chunk: Sink, num_threads: int = 1) -> bool:
    """Give the payload to the chunk, and return True.

    Raises CorruptRecord unless the record is of this kind and every digest is right. Bytes that the chunk took before
    mean nothing then.
    """
    head, digests = read_head(reader, kind.meta)
    codec = check_kind(head, kind)
    if codec is None:
        check_raw(head, chunk)
        is_straight = reader.takes_runs and (reader.has_proved or head.payload_bytes >= MIN_RUNS_BYTES)
        runs = chunk.runs() if is_straight else None
        if runs is not None:
            read_into_runs(reader, head, digests, 0, head.payload_bytes, runs, num_threads)
            return True
        for begin, end in pieces(head, reader.is_in_memory, chunk.piece_ends):
            read_piece(reader, head, digests, begin, end, chunk, num_threads)
        return True
    decoded = decode(reader, head, digests, codec)
    chunk.take(0, decoded, num_threads)
    return True


def check_raw(head: RecordHead, chunk: Sink) -> None:
    """Raise CorruptRecord unless the payload has the chunk's stretches."""
    if head.payload_bytes != head.raw_bytes or head.stretch_bytes != chunk.stretch_bytes:
        raise CorruptRecord(f"a payload of {head.payload_bytes} bytes in stretches of {head.stretch_bytes} is not raw")


def read_piece(
    reader: Reader, head: RecordHead, digests: bytes, begin: int, end: int, chunk: Sink, num_threads: int = 1
) -> bytes:
    """Give the payload's bytes [begin, end), whole stretches, to the chunk, and return their digests.

    Raises CorruptRecord for a wrong digest, unless the reader has proved the bytes.
    """
    actual = chunk.take(begin, reader.piece(head.payload_begin + begin, head.payload_begin + end), num_threads)
    first = begin // head.stretch_bytes * DIGEST_BYTES
    if not reader.has_proved and actual != digests[first : first + len(actual)]:
        raise CorruptRecord("a digest is wrong")
    return actual


def read_into_runs(
    reader: Reader, head: RecordHead, digests: bytes, begin: int, end: int, runs: Runs, num_threads: int = 1
) -> None:
    """Read the payload's bytes [begin, end), whole stretches, into their runs. Raises CorruptRecord as read_piece."""
    first, last = (-(-offset // head.stretch_bytes) * DIGEST_BYTES for offset in (begin, end))
    actual = reader.read_runs(head.payload_begin + begin, runs, head.stretch_bytes, num_threads)
    if actual is not None and actual != digests[first:last]:
        raise CorruptRecord("a digest is wrong")


def decode(reader: Reader, head: RecordHead, digests: bytes, codec: Codec) -> memoryview:
    """Return the payload, verified and then decoded. Raises CorruptRecord."""
    coded = EncodedPayload(memoryview(bytearray(head.payload_bytes)))
    if head.stretch_bytes != coded.stretch_bytes:
        raise CorruptRecord(f"stretches must have {coded.stretch_bytes} bytes, got {head.stretch_bytes}")
    for begin, end in pieces(head, reader.is_in_memory):
        read_piece(reader, head, digests, begin, end, coded)
    return codec.decode(coded.payload, head.raw_bytes, head.shape)


def copy_record(reader: Reader, writer: Writer, key: bytes) -> None:
    """Copy a whole record as it is, with the digests that a proved record lacks.

    Raises CorruptRecord for a wrong digest, or if it is not that of `key`; UnreadableRecord for a sealed one.
    """
    head, digests = _read_open_head(reader, key)
    header, copied = head.pack(), []
    writer.piece(0, head.payload_begin)[:] = header
    for begin, end in pieces(head, is_in_memory=False):
        to = writer.piece(head.payload_begin + begin, head.payload_begin + end)
        copied.append(read_piece(reader, head, digests, begin, end, BytesSink(to, head.stretch_bytes)))
    table = b"".join(copied)
    writer.piece(head.payload_end, head.num_bytes)[:] = table + checksum_of(header, table)


def verify_record(reader: Reader, key: bytes) -> None:
    """Raise CorruptRecord unless the record is that of the key and every digest is right.

    Raises UnreadableRecord for a sealed one.
    """
    head, digests = _read_open_head(reader, key)
    for begin, end in pieces(head, reader.is_in_memory):
        read_piece(reader, head, digests, begin, end, BytesSink(None, head.stretch_bytes))


def pieces(head: RecordHead, is_in_memory: bool, piece_ends: Sequence[int] | None = None) -> Sequence[tuple[int, int]]:
    """Return begin and end of each piece in the payload: whole stretches, but for the last.

    piece_ends: bytes at which pieces may end, ascending; None for each stretch's end.
    """
    if is_in_memory:
        return [(0, head.payload_bytes)] if head.payload_bytes else []
    if piece_ends is not None:
        return list(_pieces_to(piece_ends))
    begins = range(0, head.payload_bytes, max(PIECE_BYTES // head.stretch_bytes, 1) * head.stretch_bytes)
    return list(zip(begins, (*begins[1:], head.payload_bytes), strict=False))


def _pieces_to(ends: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Walk over pieces of PIECE_BYTES at most, or as few more as their ends allow."""
    begin = 0
    for end, after in pairwise([*ends, ends[-1] + PIECE_BYTES + 1]):
        if after - begin > PIECE_BYTES:
            yield begin, end
            begin = end


def _read_open_head(reader: Reader, key: bytes) -> tuple[RecordHead, bytes]:
    """Return head and digests of the record of a key. Raises as `read_head` with a meta."""
    head, digests = read_head(reader)
    if head.key != key:
        raise CorruptRecord("the record is another one", "foreign")
    if head.codec == SEALED_CODEC:
        raise _sealed()
    return head, digests


def _sealed() -> UnreadableRecord:
    return UnreadableRecord("the record is sealed, and its tier has no keys", "key")

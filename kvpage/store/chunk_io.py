"""Chunks to records and back: piece by piece, each filled, hashed and stored while the CPU's cache holds it.

write   header ─► [ fill piece 0 ─► hash ] ─► [ fill piece 1 ─► hash ] ... ─► checksum
read    header: is it what was asked for? ─► [ hash piece 0 ─► take ] ... ─► checksum: only now it counts
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import xxhash

from kvpage.store.record import ALIGNMENT, CHECKSUM_BYTES, HEADER, CorruptRecord, RecordHead, Shape
from kvpage.store.tier import Reader, Writer


class Part(NamedTuple):
    """A run of a payload. fill: writes it into a buffer of num_bytes."""

    num_bytes: int
    fill: Callable[[memoryview], None]


class Codec(Protocol):
    """How a payload is encoded. name: at most 16 ASCII characters, dtype included."""

    name: str

    def encode(self, raw: memoryview, shape: Shape) -> bytes | memoryview: ...

    def decode(self, payload: memoryview, raw_bytes: int, shape: Shape) -> memoryview: ...


class RecordKind(NamedTuple):
    """What a record must be. shape: of its payload, decoded. codec: None for raw."""

    key: bytes
    meta: bytes
    shape: Shape
    raw_bytes: int
    codec_name: str
    codec: Codec | None = None

    def head(self, payload_bytes: int) -> RecordHead:
        return RecordHead(self.key, self.meta, self.codec_name, self.shape, self.raw_bytes, payload_bytes)


def encoded(kind: RecordKind, parts: Sequence[Part]) -> tuple[RecordHead, Sequence[Part]]:
    """The head of the record that `parts` become, and what its payload is made of."""
    if kind.codec is None:
        return kind.head(kind.raw_bytes), parts
    raw = bytearray(kind.raw_bytes)
    at = 0
    for part in parts:
        part.fill(memoryview(raw)[at : at + part.num_bytes])
        at += part.num_bytes
    payload = memoryview(kind.codec.encode(memoryview(raw), kind.shape)).cast("B")

    def fill(buffer: memoryview) -> None:
        buffer[:] = payload

    return kind.head(len(payload)), [Part(len(payload), fill)]


def write_record(writer: Writer, head: RecordHead, parts: Sequence[Part]) -> None:
    """Fills all of the writer's room. TierError comes through."""
    checksum = xxhash.xxh3_128()
    piece = writer.piece(0, head.payload_begin)
    piece[:] = head.pack()
    checksum.update(piece)
    at = head.payload_begin
    for part in parts:
        piece = writer.piece(at, at + part.num_bytes)
        part.fill(piece)
        checksum.update(piece)
        at += part.num_bytes
    writer.piece(at, at + CHECKSUM_BYTES)[:] = checksum.digest()


def read_head(reader: Reader, meta: bytes, checksum: "xxhash.xxh3_128 | None" = None) -> RecordHead:
    """The head of a record whose meta should be `meta`, fed to the checksum. CorruptRecord if it is anything else."""
    begin = -(-(HEADER.size + len(meta)) // ALIGNMENT) * ALIGNMENT
    if reader.num_bytes < begin + CHECKSUM_BYTES:
        raise CorruptRecord(f"a record of {reader.num_bytes} bytes has no room for its head")
    piece = reader.piece(0, begin)
    head = RecordHead.unpack(piece, reader.num_bytes)
    if checksum is not None:
        checksum.update(piece)
    if head.meta != meta:
        raise CorruptRecord("the record is of another model, layout or namespace")
    return head


def read_record(
    reader: Reader, kind: RecordKind, sizes: Sequence[int], take: Callable[[int, memoryview], None]
) -> None:
    """Gives the payload's runs of `sizes` to take(index, bytes), in order; CorruptRecord unless the record is of this
    kind and its checksum right: what was taken until then means nothing.
    """
    checksum = xxhash.xxh3_128()
    head = read_head(reader, kind.meta, checksum)
    if (head.key, head.shape, head.raw_bytes, head.codec) != (kind.key, kind.shape, kind.raw_bytes, kind.codec_name):
        raise CorruptRecord("the record is another one")
    if sum(sizes) != head.raw_bytes or (kind.codec is None and head.payload_bytes != head.raw_bytes):
        raise CorruptRecord("the payload has another size")
    if kind.codec is None:
        for index, (begin, end) in enumerate(_runs(head.payload_begin, sizes)):
            piece = reader.piece(begin, end)
            checksum.update(piece)
            take(index, piece)
        check_end(reader, head, checksum)
        return
    payload = bytearray(head.payload_bytes)
    copy_pieces(reader, head.payload_begin, memoryview(payload), checksum)
    check_end(reader, head, checksum)  # before anything is decoded
    raw = kind.codec.decode(memoryview(payload), head.raw_bytes, head.shape)
    for index, (begin, end) in enumerate(_runs(0, sizes)):
        take(index, raw[begin:end])


def copy_pieces(reader: Reader, begin: int, into: memoryview, checksum: "xxhash.xxh3_128", size: int = 1 << 20) -> None:
    for at in range(0, len(into), size):
        piece = reader.piece(begin + at, begin + min(at + size, len(into)))
        checksum.update(piece)
        into[at : at + len(piece)] = piece


def check_end(reader: Reader, head: RecordHead, checksum: "xxhash.xxh3_128") -> None:
    if bytes(reader.piece(head.payload_end, head.num_bytes)) != checksum.digest():
        raise CorruptRecord("the checksum is wrong")


def copy_record(reader: Reader, writer: Writer, key: bytes, size: int = 1 << 20) -> None:
    """A whole record, as it is. CorruptRecord if it is not what its checksum says, or not that of `key`."""
    checksum, end_of_payload = xxhash.xxh3_128(), reader.num_bytes - CHECKSUM_BYTES
    for begin in range(0, end_of_payload, size):
        end = min(begin + size, end_of_payload)
        piece = reader.piece(begin, end)
        if begin == 0 and record_key(piece) != key:
            raise CorruptRecord("the record is another one")
        checksum.update(piece)
        writer.piece(begin, end)[:] = piece
    if bytes(reader.piece(end_of_payload, reader.num_bytes)) != checksum.digest():
        raise CorruptRecord("the checksum is wrong")
    writer.piece(end_of_payload, reader.num_bytes)[:] = checksum.digest()


def record_key(data: memoryview) -> bytes | None:
    """The key that the first bytes of a record name; None if they are too few."""
    return HEADER.unpack_from(data)[3] if len(data) >= HEADER.size else None


def _runs(begin: int, sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    for size in sizes:
        yield begin, begin + size
        begin += size

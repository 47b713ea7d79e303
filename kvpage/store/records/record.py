"""RecordHead: the head of a record. A record is one chunk with its key and checksums, the same bytes in every tier.

    header     112 bytes, fixed, little-endian (HEADER below): magic, key, lengths, codec, shape
    meta       the canonical encoding of KVStoreMetadata and the namespace, from which the key is made
    padding    zeros up to a multiple of 64: the payload starts on a cache line
    payload    K and V as the codec left them, in stretches of the length in the header, the last one shorter
    digests    16 bytes for each stretch: its xxh3-128; zeros where another proof is around the record, as a seal
    checksum   16 bytes, xxh3-128 of header, meta, padding and digests: last, so that a record is written in one pass

Stretches (layers, in raw chunks) can be hashed in any order by several threads, and each can be verified when it has
come. A reader takes nothing for granted: a header with an unexpected field, a wrong checksum or a wrong digest is a
miss.
"""

import struct
from dataclasses import dataclass, field

MAGIC = b"kvpagerc"
VERSION = 2
ALIGNMENT = 64
CHECKSUM_BYTES = DIGEST_BYTES = 16
MAX_META_BYTES = 1 << 16
HEADER = struct.Struct("<8sII32sQQ16s5IQ4x")  # as RecordHead.pack has it
assert HEADER.size == 112

BYTES_CODEC = "bytes"  # of records whose payload has no shape: they are a ByteStore's
STATE_CODEC, INDEX_CODEC = "state", "state-index"  # the same, beside chunks; the third number of the shape is tokens
SEALED_CODEC = "sealed"  # of records whose payload is another record, encrypted
CODEC_AT = slice(64, 80)  # of a header
SEALED_FIELD = SEALED_CODEC.encode().ljust(16, b"\0")

Shape = tuple[int, int, int, int, int]
"""[layers, parts, tokens, heads, size] or [layers, parts, heads, tokens, size], by the format in `meta`."""


class CorruptRecord(Exception):
    """The bytes are not the record of the key. The reader counts a miss and drops it.

    reason: "damaged"; "foreign", the record of another model or prompt; "seal", which is broken; "plain", not sealed.
    """

    def __init__(self, message: str, reason: str = "damaged") -> None:
        super().__init__(message)
        self.reason = reason


class UnreadableRecord(Exception):
    """The record is whole, but its reader cannot read it: a miss, and it stays for others.

    reason: "codec", which the reader does not know; "key", which it does not have.
    """

    def __init__(self, message: str, reason: str = "codec") -> None:
        super().__init__(message)
        self.reason = reason


def is_bytes(codec: str) -> bool:
    """Return whether the codec of a head is one of a ByteStore's records."""
    return codec.partition(":")[0] == BYTES_CODEC


def is_sealed(header: bytes | memoryview) -> bool:
    """Return whether the first bytes of a record are those of a sealed one."""
    return header[:8] == MAGIC and header[CODEC_AT] == SEALED_FIELD


@dataclass(frozen=True, slots=True)
class RecordHead:
    """Header and meta of a record.

    Attributes:
        key: 32 bytes.
        meta: the encoding of metadata and namespace.
        codec: dtype and compression of the payload, such as "bfloat16" or "bfloat16:fp8"; at most 16 ASCII characters.
        shape: of the payload, decoded.
        raw_bytes: bytes of the payload, decoded.
        payload_bytes: bytes of the payload, as stored.
        stretch_bytes: bytes of each stretch of the payload but the last, which may be shorter.
        payload_begin: the payload's first byte in the record.
        payload_end: the byte after the payload's last one.
        num_bytes: bytes of the whole record.
    """

    key: bytes
    meta: bytes
    codec: str
    shape: Shape
    raw_bytes: int
    payload_bytes: int
    stretch_bytes: int
    payload_begin: int = field(init=False, repr=False, compare=False)
    payload_end: int = field(init=False, repr=False, compare=False)
    num_bytes: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.key) != 32:
            raise ValueError(f"key must be 32 bytes, got {len(self.key)}")
        if len(self.meta) > MAX_META_BYTES:
            raise ValueError(f"meta must be at most {MAX_META_BYTES} bytes, got {len(self.meta)}")
        if not self.codec.isascii() or not 0 < len(self.codec) <= 16 or "\0" in self.codec:
            raise ValueError(f"codec must be 1 to 16 ASCII characters, got {self.codec!r}")
        if self.stretch_bytes < 1:
            raise ValueError(f"stretch_bytes must be positive, got {self.stretch_bytes}")
        begin = -(-(HEADER.size + len(self.meta)) // ALIGNMENT) * ALIGNMENT
        end, num_stretches = begin + self.payload_bytes, -(-self.payload_bytes // self.stretch_bytes)
        object.__setattr__(self, "payload_begin", begin)
        object.__setattr__(self, "payload_end", end)
        object.__setattr__(self, "num_bytes", end + DIGEST_BYTES * num_stretches + CHECKSUM_BYTES)

    def pack(self) -> bytes:
        """Return all bytes before the payload."""
        head = HEADER.pack(
            MAGIC,
            VERSION,
            len(self.meta),
            self.key,
            self.payload_bytes,
            self.raw_bytes,
            self.codec.encode("ascii"),
            *self.shape,
            self.stretch_bytes,
        )
        return (head + self.meta).ljust(self.payload_begin, b"\0")

    @property
    def num_digest_bytes(self) -> int:
        """Bytes of all digests."""
        return self.num_bytes - CHECKSUM_BYTES - self.payload_end

    @classmethod
    def unpack(cls, data: memoryview | bytes, num_bytes: int) -> "RecordHead":
        """Return the head in the first bytes of a record of `num_bytes`.

        Nothing in them is trusted, and no length in them may reach outside the record. Raises CorruptRecord for bytes
        that are not a head.
        """
        if len(data) < HEADER.size or num_bytes < HEADER.size + CHECKSUM_BYTES:
            raise CorruptRecord(f"a record has at least {HEADER.size + CHECKSUM_BYTES} bytes, got {num_bytes}")
        magic, version, num_meta, key, payload_bytes, raw_bytes, codec, *shape, stretch_bytes = HEADER.unpack_from(data)
        if magic != MAGIC or version != VERSION:
            raise CorruptRecord(f"magic and version must be {MAGIC!r} and {VERSION}, got {magic!r} and {version}")
        if num_meta > MAX_META_BYTES or HEADER.size + num_meta > len(data):
            raise CorruptRecord(f"meta of {num_meta} bytes does not fit")
        try:
            name = codec.rstrip(b"\0").decode("ascii")
            meta = bytes(data[HEADER.size : HEADER.size + num_meta])
            head = cls(key, meta, name, tuple(shape), raw_bytes, payload_bytes, stretch_bytes)
        except ValueError as error:
            raise CorruptRecord(str(error)) from error
        if head.num_bytes != num_bytes or bytes(data[: head.payload_begin]) != head.pack():
            raise CorruptRecord(f"a header for {head.num_bytes} bytes is in a record of {num_bytes}")
        return head

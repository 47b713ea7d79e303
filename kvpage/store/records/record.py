"""The record: one chunk with all that tells whether it is the right one, the same bytes in every tier.

    header     112 bytes, fixed, little-endian (HEADER below): magic, key, lengths, codec, shape
    meta       who wrote it: the canonical encoding of KVStoreMetadata and the namespace, of which the key is made
    padding    zeros up to a multiple of 64: the payload starts on a cache line
    payload    K and V as the codec left them, in stretches of a length that the header tells, the last one shorter
    digests    16 bytes for each stretch: its xxh3-128
    checksum   16 bytes, xxh3-128 of header, meta, padding and digests: last, so that a record is written in one pass

Stretches (of raw chunks: layers) can be hashed in any order, by several threads, and each can be believed when it has
come. A reader takes nothing for granted: a header that is not as expected to the last field, or another checksum or
digest, is a miss.
"""

import struct
from dataclasses import dataclass

MAGIC = b"kvpagerc"
VERSION = 2
ALIGNMENT = 64
CHECKSUM_BYTES = DIGEST_BYTES = 16
MAX_META_BYTES = 1 << 16
HEADER = struct.Struct("<8sII32sQQ16s5IQ4x")  # as RecordHead.pack has it
assert HEADER.size == 112

Shape = tuple[int, int, int, int, int]
"""[layers, parts, tokens, heads, size] or [layers, parts, heads, tokens, size], as the format in `meta` says."""


class CorruptRecord(Exception):
    """The bytes are not the record that was asked for. Whoever reads counts a miss and drops it."""


class UnreadableRecord(Exception):
    """The record is whole, yet written in a way that its reader does not know: a miss, and it stays for others."""


@dataclass(frozen=True, slots=True)
class RecordHead:
    """Header and meta of a record.

    key: 32 bytes. codec: a name of at most 16 ASCII characters, dtype and compression of the payload, such as
    "bfloat16" or "fp8_e4m3:bfloat16". raw_bytes: of the payload once it is decoded. payload_bytes: as stored.
    stretch_bytes: of each stretch of the payload but the last, which may be shorter.
    """

    key: bytes
    meta: bytes
    codec: str
    shape: Shape
    raw_bytes: int
    payload_bytes: int
    stretch_bytes: int

    def __post_init__(self) -> None:
        if len(self.key) != 32:
            raise ValueError(f"key must be 32 bytes, got {len(self.key)}")
        if len(self.meta) > MAX_META_BYTES:
            raise ValueError(f"meta must be at most {MAX_META_BYTES} bytes, got {len(self.meta)}")
        if not self.codec.isascii() or not 0 < len(self.codec) <= 16 or "\0" in self.codec:
            raise ValueError(f"codec must be 1 to 16 ASCII characters, got {self.codec!r}")
        if self.stretch_bytes < 1:
            raise ValueError(f"stretch_bytes must be positive, got {self.stretch_bytes}")

    @property
    def payload_begin(self) -> int:
        return -(-(HEADER.size + len(self.meta)) // ALIGNMENT) * ALIGNMENT

    @property
    def payload_end(self) -> int:
        return self.payload_begin + self.payload_bytes

    @property
    def digests_end(self) -> int:
        return self.payload_end + DIGEST_BYTES * -(-self.payload_bytes // self.stretch_bytes)

    @property
    def num_bytes(self) -> int:
        """Of the whole record."""
        return self.digests_end + CHECKSUM_BYTES

    def pack(self) -> bytes:
        """All that comes before the payload."""
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

    @classmethod
    def unpack(cls, data: memoryview | bytes, num_bytes: int) -> "RecordHead":
        """From the first bytes of a record of `num_bytes`. CorruptRecord if they cannot be: nothing of them is trusted,
        and no length in them reaches outside the record.
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
            head = cls(key, meta, name, tuple(shape), raw_bytes, payload_bytes, stretch_bytes)  # type: ignore[arg-type]
        except ValueError as error:
            raise CorruptRecord(str(error)) from error
        if head.num_bytes != num_bytes or bytes(data[: head.payload_begin]) != head.pack():
            raise CorruptRecord(f"a header of {head.num_bytes} bytes stands before a record of {num_bytes}")
        return head

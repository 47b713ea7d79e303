"""Sealed records: a record within a record, encrypted and authenticated by AES-256-GCM.

    header     as of every record, with the codec "sealed"; meta: SealNote, in clear
    payload    frame 1 | frame 2 | ... | frame 0 | zeros          each followed by its tag, 16 bytes
    digests    zeros: the tags prove more
    checksum   of the header and the zeros

    the record   [ lead: the first piece ][ FRAME_BYTES ][ FRAME_BYTES ][ whole grains ][ trail: less than a grain ]
    its frames          0                       1              2               3             0

So a record of whole pages has its head and its digests in frame 0, and its payload alone in the others: they are opened
where the payload goes.

Each record has an AES key of its own, HMAC-SHA256(secret, salt and the record's key), with 32 random bytes as salt. A
nonce is the number of a frame, and a writer seals each frame once. So no nonce is used twice with a key: not by
another record, nor by another version of the same one, nor by another process. The associated data are header and note:
the record's key, its lengths, the id of the secret and the salt. A frame that was changed, moved or cut, or that is
another record's, does not open.
"""

import functools
import hmac
import os
import struct
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvpage.store.records.record import (
    ALIGNMENT,
    HEADER,
    SEALED_CODEC,
    CorruptRecord,
    RecordHead,
    Shape,
    UnreadableRecord,
)
from kvpage.store.sealed.seal_keys import ID, SealKeys

NOTE = struct.Struct("<13s32sQI")  # magic, salt, bytes of the record, bytes of the lead; the id follows
NOTE_MAGIC, PURPOSE = b"kvpage-seal-2", b"kvpage seal 2"  # other frames are another version, and a miss
FRAME_BYTES, GRAIN_BYTES, TAG_BYTES, SALT_BYTES = 1 << 19, 1 << 12, 16, 32
SEALED_FRAME, MAX_LEAD_BYTES = FRAME_BYTES + TAG_BYTES, FRAME_BYTES - GRAIN_BYTES
NO_SHAPE: Shape = (0, 0, 0, 0, 0)
MAX_HEAD_BYTES = 256  # of a sealed record: its note has at most 121
NUM_META_AT, KEY_AT = slice(12, 16), slice(16, 48)  # of a header
SALT_AT = slice(HEADER.size + len(NOTE_MAGIC), HEADER.size + len(NOTE_MAGIC) + SALT_BYTES)  # of a sealed record's


@dataclass(frozen=True, slots=True)
class SealNote:
    """The meta of a sealed record.

    Attributes:
        key_id: of the secret.
        salt: SALT_BYTES random bytes, this record's alone.
        plain_bytes: of the record within.
        lead_bytes: of the first piece, at most MAX_LEAD_BYTES; none if the record began in runs.
    """

    key_id: str
    salt: bytes
    plain_bytes: int
    lead_bytes: int

    def pack(self) -> bytes:
        """Return the bytes of the meta."""
        note = NOTE.pack(NOTE_MAGIC, self.salt, self.plain_bytes, self.lead_bytes)
        return note + self.key_id.encode("ascii")

    @classmethod
    def of(cls, head: RecordHead) -> "SealNote":
        """Return the note of a sealed record. Raises CorruptRecord if it is not one, or not of the head's lengths."""
        if head.codec != SEALED_CODEC:
            raise CorruptRecord("the record is not sealed", "plain")
        if len(head.meta) < NOTE.size:
            raise CorruptRecord(f"a note has at least {NOTE.size} bytes, got {len(head.meta)}")
        magic, salt, plain_bytes, lead_bytes = NOTE.unpack_from(head.meta)
        key_id = head.meta[NOTE.size :].decode("latin-1")
        if magic != NOTE_MAGIC or not ID.fullmatch(key_id):
            raise CorruptRecord("the note is of another version")
        note = cls(key_id, salt, plain_bytes, lead_bytes)
        actual = head.shape, head.raw_bytes, head.payload_bytes, head.stretch_bytes
        expected = NO_SHAPE, plain_bytes, payload_bytes_of(plain_bytes), SEALED_FRAME
        if lead_bytes > min(plain_bytes, MAX_LEAD_BYTES) or actual != expected:
            raise CorruptRecord(f"a sealed record of {plain_bytes} bytes has another head")
        return note

    def head(self, key: bytes) -> RecordHead:
        """Return the head of the sealed record of a key."""
        payload_bytes = payload_bytes_of(self.plain_bytes)
        return RecordHead(
            key, self.pack(), SEALED_CODEC, NO_SHAPE, self.plain_bytes, payload_bytes, stretch_bytes=SEALED_FRAME
        )

    @property
    def body_bytes(self) -> int:
        """The plain bytes of the frames from 1 on."""
        return (self.plain_bytes - self.lead_bytes) // GRAIN_BYTES * GRAIN_BYTES

    @property
    def trail_bytes(self) -> int:
        """The bytes after them."""
        return (self.plain_bytes - self.lead_bytes) % GRAIN_BYTES


def new_note(key_id: str, plain_bytes: int, lead_bytes: int) -> SealNote:
    """Return the note of a new record, with a salt of its own."""
    return SealNote(key_id, os.urandom(SALT_BYTES), plain_bytes, lead_bytes)


def payload_bytes_of(plain_bytes: int) -> int:
    """Return the bytes that all frames and tags take at most, whatever the lead's."""
    return plain_bytes + TAG_BYTES * (1 + -(-plain_bytes // FRAME_BYTES))


@functools.lru_cache(maxsize=64)  # most records of a store have one length
def sealed_bytes_of(key_id: str, plain_bytes: int) -> int:
    """Return the bytes of the sealed record of one with `plain_bytes`."""
    return SealNote(key_id, bytes(SALT_BYTES), plain_bytes, 1).head(bytes(32)).num_bytes


class SealedForm(NamedTuple):
    """Where all is in a sealed record. Key and salt have no say in it, so that records of one length share it.

    Attributes:
        key_id: of the secret.
        plain_bytes: of the record within.
        lead_bytes: of its beginning, in frame 0.
        body_end: in the record within, the byte after the frames from 1 on.
        payload_begin: in the sealed record, where frame 1 begins.
        frame_0: likewise, where frame 0 begins.
        zeros: likewise, the byte after its tag.
        table: likewise, where digests and checksum begin.
    """

    key_id: str
    plain_bytes: int
    lead_bytes: int
    body_end: int
    payload_begin: int
    frame_0: int
    zeros: int
    table: int


def form_of(data: bytes, num_bytes: int) -> tuple[SealedForm, bytes]:
    """Return form and header of a sealed record of `num_bytes` with these first bytes.

    Raises CorruptRecord for bytes that are no such header.
    """
    num_meta = int.from_bytes(data[NUM_META_AT], "little")
    header = data[: -(-(HEADER.size + num_meta) // ALIGNMENT) * ALIGNMENT]
    before, between, after = header[: KEY_AT.start], header[KEY_AT.stop : SALT_AT.start], header[SALT_AT.stop :]
    return _form_of(b"".join((before, bytes(32), between, bytes(SALT_BYTES), after)), num_bytes), header


@functools.lru_cache(maxsize=64)  # most records of a store have one length
def _form_of(blank: bytes, num_bytes: int) -> SealedForm:
    head = RecordHead.unpack(blank, num_bytes)
    note, begin = SealNote.of(head), head.payload_begin
    num_frames = -(-note.body_bytes // FRAME_BYTES)
    frame_0 = begin + note.body_bytes + num_frames * TAG_BYTES
    zeros = frame_0 + note.lead_bytes + note.trail_bytes + TAG_BYTES
    body_end = note.lead_bytes + note.body_bytes
    return SealedForm(note.key_id, note.plain_bytes, note.lead_bytes, body_end, begin, frame_0, zeros, head.payload_end)


class FrameCipher:
    """Seals and opens the frames of one record. A writer seals each number once.

    key_id: of the secret, as the header says.
    header: all bytes of the sealed record before its payload, to which its frames are bound.

    Raises UnreadableRecord for a key that is not there, and ImportError without the package cryptography.
    """

    def __init__(self, keys: SealKeys, key_id: str, header: bytes) -> None:
        secret = keys.secret(key_id)
        if secret is None:
            raise UnreadableRecord(f"a record is sealed with the key {key_id}, which is not here", "key")
        self._bound = header
        keyed = _keyed(secret).copy()
        keyed.update(PURPOSE + header[SALT_AT] + header[KEY_AT])
        self._aes, self._invalid = new_aes(keyed.digest()), _package()[1]

    def seal(self, number: int, data: memoryview, to: memoryview) -> None:
        """Write frames from this number on, each with its tag: `data` has those of whole ones, or of a short one."""
        encrypt, bound = self._aes.encrypt_into, self._bound  # a frame leaves little else in a core's cache
        for at in range(0, len(data), FRAME_BYTES):
            frame = data[at : at + FRAME_BYTES]
            encrypt(_nonce(number), frame, bound, to[: len(frame) + TAG_BYTES])
            number, to = number + 1, to[SEALED_FRAME:]

    def open(self, number: int, data: memoryview, to: memoryview) -> None:
        """Write the bytes of the frames from this number on: `data` has whole ones one after the other, or a short one.

        Raises CorruptRecord for other data than `seal` wrote for these numbers: bytes that were written mean nothing.
        """
        decrypt, bound = self._aes.decrypt_into, self._bound  # a frame leaves little else in a core's cache
        try:
            for at in range(0, len(to), FRAME_BYTES):
                decrypt(_nonce(number), data[:SEALED_FRAME], bound, to[at : at + FRAME_BYTES])
                number, data = number + 1, data[SEALED_FRAME:]
        except self._invalid:
            raise CorruptRecord("the seal is broken", "seal") from None


@functools.lru_cache(maxsize=16)
def _keyed(secret: bytes) -> hmac.HMAC:
    """Return an HMAC-SHA256 that has taken the secret. A copy of it goes on in two thirds of hmac.digest's time."""
    return hmac.new(secret, digestmod="sha256")


def new_aes(key: bytes) -> Any:
    """Return AES-GCM with a key. Raises ImportError without the package."""
    return _package()[0](key)


@functools.cache
def _package() -> tuple[Any, type[Exception]]:
    """Return AES-GCM, and its error for data that do not open. Raises ImportError."""
    try:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError as error:
        raise ImportError("sealed records need the package cryptography: pip install 'kvpage[seal]'") from error
    return AESGCM, InvalidTag


def _nonce(number: int) -> bytes:
    return number.to_bytes(12, "little")

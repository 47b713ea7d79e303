"""ByteKeys: the names of records of bytes in the tiers, made of a header and of the caller's keys.

seed    SHA-256 over the header's encoding
key     SHA-256 over the seed | the caller's key          so another header is another key
"""

import hashlib
from collections.abc import Sequence

from kvpage.checks.values import as_list
from kvpage.store.records.kinds import RecordKind
from kvpage.store.records.record import BYTES_CODEC, Shape
from kvpage.store.tiers.tier import Key

MAX_KEY_BYTES = 65535
NO_SHAPE: Shape = (0, 0, 0, 0, 0)


def checked_keys(keys: Sequence[bytes]) -> list[bytes]:
    """Return the keys as a list. Raises TypeError unless they are bytes, ValueError for an empty or too long one."""
    key_list = as_list("keys", keys)
    for key in key_list:
        if not isinstance(key, bytes):
            raise TypeError(f"keys must be bytes, got {type(key).__name__}")
        if not 0 < len(key) <= MAX_KEY_BYTES:
            raise ValueError(f"keys must be of 1 to {MAX_KEY_BYTES} bytes, got one of {len(key)}")
    return key_list


class ByteKeys:
    """Makes the names of records. meta: the encoding of a header."""

    def __init__(self, meta: bytes) -> None:
        self.meta = meta
        self._seed = hashlib.sha256(meta).digest()

    def of(self, keys: Sequence[bytes]) -> list[Key]:
        """Return the names of checked keys."""
        return [hashlib.sha256(self._seed + key).digest() for key in keys]

    def kind(self, name: Key, num_bytes: int) -> RecordKind:
        """Return the kind of the record of a name and `num_bytes` bytes."""
        return RecordKind(name, self.meta, NO_SHAPE, num_bytes, {BYTES_CODEC: None})

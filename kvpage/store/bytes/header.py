"""The header of a store of bytes: facts that all of its records depend on, as the `meta` of each record.

    {"model": "m@1", "version": 1} ─► "kvpage-bytes-1" | s "model" s "m@1" | s "version" i "1"        sorted by name
    b"any bytes"                   ─► "kvpage-bytes-1" | y ..

Each value has the letter of its type, and its length. So no two headers have the same encoding: 1, "1", 1.0 and True
differ.
"""

import struct
from collections.abc import Mapping, Sequence
from typing import Any

from kvpage.store.records.record import MAX_META_BYTES

ENCODING = b"kvpage-bytes-1"
_LENGTH = struct.Struct("<cQ")

Value = str | int | float | bool | bytes | None | Sequence[Any]
Header = Mapping[str, Value] | bytes
"""Names and values, or bytes that a caller encoded. Lists and tuples of the same values are one."""


def encode_header(header: Header) -> bytes:
    """Return the canonical encoding.

    Raises TypeError for values of other types and names that are not text; ValueError for a header that is too long.
    """
    if isinstance(header, bytes):
        body = _one(header)
    elif isinstance(header, Mapping):
        for name in header:
            if not isinstance(name, str):
                raise TypeError(f"names of a header must be text, got {type(name).__name__}")
        body = b"".join(_one(name) + _one(header[name]) for name in sorted(header))
    else:
        raise TypeError(f"header must be a mapping or bytes, got {type(header).__name__}")
    if len(ENCODING) + len(body) > MAX_META_BYTES:
        raise ValueError(f"header must be at most {MAX_META_BYTES - len(ENCODING)} bytes encoded, got {len(body)}")
    return ENCODING + body


def _one(value: Value) -> bytes:
    letter, data = _typed(value)
    return _LENGTH.pack(letter, len(data)) + data


def _typed(value: Value) -> tuple[bytes, bytes]:
    """Return the letter of the value's type, and its bytes."""
    if isinstance(value, bool):
        return b"b", b"1" if value else b"0"
    if isinstance(value, str):
        return b"s", value.encode("utf-8", "surrogatepass")
    if isinstance(value, int):
        return b"i", str(int(value)).encode()
    if isinstance(value, float):
        return b"f", struct.pack("<d", value)
    if isinstance(value, bytes):
        return b"y", value
    if value is None:
        return b"n", b""
    if isinstance(value, list | tuple):
        return b"l", b"".join(map(_one, value))
    raise TypeError(
        f"values of a header must be str, int, float, bool, None, bytes or lists of them, got {type(value).__name__}"
    )

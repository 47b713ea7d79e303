"""The header of a store of bytes: facts that all of its records depend on, as the `meta` of each record.

    {"model": "m@1", "version": 1} ─► "kvpage-bytes-1" | s "model" s "m@1" | s "version" i "1"        sorted by name
    b"any bytes"                   ─► "kvpage-bytes-1" | y ..

Each value has the letter of its type, and its length. So no two headers have the same encoding: 1, "1", 1.0 and True
differ.
"""

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvpage.store.records.record import MAX_META_BYTES

ENCODING = b"kvpage-bytes-1"
MAX_DIGITS, MAX_DEPTH = 64, 8  # of numbers and lists that are read: anybody may have written them
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


def decode_header(meta: bytes) -> dict[str, Value]:
    """Return the names and values of `encode_header`; none for bytes that a caller encoded.

    Nothing in the bytes is trusted. Raises ValueError for others.
    """
    if not meta.startswith(ENCODING):
        raise ValueError("a header must begin as this version writes it")
    values = list(_values(meta[len(ENCODING) :]))
    if len(values) == 1 and isinstance(values[0], bytes):
        return {}
    if len(values) % 2:
        raise ValueError("a header must be names and values")
    names = values[0::2]
    if not all(isinstance(name, str) for name in names):
        raise ValueError("names of a header must be text")
    return {str(name): value for name, value in zip(names, values[1::2], strict=True)}


def _values(data: bytes, depth: int = 0) -> Iterator[Value]:
    """Walk over encoded values. depth: of the list that they are in."""
    if depth > MAX_DEPTH:
        raise ValueError(f"lists of a header must be nested at most {MAX_DEPTH} times")
    at = 0
    while at < len(data):
        if at + _LENGTH.size > len(data):
            raise ValueError("a header ends within a length")
        letter, length = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        if length > len(data) - at:
            raise ValueError("a header ends within a value")
        yield _value(letter, data[at : at + length], depth)
        at += length


def _value(letter: bytes, data: bytes, depth: int) -> Value:
    """Return what `_typed` encodes."""
    match letter:
        case b"b" if data in (b"0", b"1"):
            return data == b"1"
        case b"s":
            return data.decode("utf-8", "surrogatepass")
        case b"i" if len(data) <= MAX_DIGITS:
            return int(data)
        case b"f" if len(data) == struct.calcsize("<d"):
            return float(struct.unpack("<d", data)[0])
        case b"y":
            return data
        case b"n" if not data:
            return None
        case b"l":
            return [*_values(data, depth + 1)]
    raise ValueError(f"a value of a header must be of a known type, got {letter!r} of {len(data)} bytes")


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

"""The bytes of a value that vLLM hashes: of None, natural numbers, bytes, text, and tuples of these.

pickled           as Python's pickle writes it, of protocol 5
canonical_cbor    as RFC 8949 says

Nothing here reads such bytes: pickle itself is not needed, nor wanted, beside data of others.
"""

from typing import Any

FRAME_BYTES = 1 << 16
TUPLES = {0: b")", 1: b"\x85", 2: b"\x86", 3: b"\x87"}
MEMOIZE = b"\x94"


class _Frames:
    """Opcodes in frames. One that is long enough is closed before the next object, and long data stand in none."""

    def __init__(self) -> None:
        self._closed, self._open = bytearray(b"\x80\x05"), bytearray()

    def add(self, opcodes: bytes) -> None:
        self._open += opcodes

    def begin_object(self) -> None:
        if len(self._open) >= FRAME_BYTES:
            self._close()

    def add_data(self, head: bytes, data: bytes) -> None:
        if len(data) < FRAME_BYTES:
            self._open += head + data
        else:
            self._close()
            self._closed += head + data

    def finished(self) -> bytes:
        self._open += b"."
        self._close()
        return bytes(self._closed)

    def _close(self) -> None:
        is_framed = len(self._open) >= 4
        self._closed += b"\x95" + len(self._open).to_bytes(8, "little") if is_framed else b""
        self._closed += self._open
        self._open.clear()


def pickled(value: Any) -> bytes:
    """Return the pickle of a value in which no object but a number occurs twice.

    Args:
        value: None, a natural number below 2**31, bytes, text, or a tuple of these.

    Returns:
        The bytes.
    """
    frames = _Frames()
    _pickle(value, frames)
    return frames.finished()


def _pickle(value: Any, frames: _Frames) -> None:
    frames.begin_object()
    if isinstance(value, tuple):
        frames.add(b"(" if len(value) > 3 else b"")
        for part in value:
            _pickle(part, frames)
        frames.add(TUPLES.get(len(value), b"t") + (MEMOIZE if value else b""))
    elif isinstance(value, int):
        size, code = next(((size, code) for size, code in ((1, b"K"), (2, b"M")) if value < 1 << 8 * size), (4, b"J"))
        frames.add(code + value.to_bytes(size, "little"))
    elif value is None:
        frames.add(b"N")
    else:
        data, short, long = (value, b"C", b"B") if isinstance(value, bytes) else (value.encode(), b"\x8c", b"X")
        head = short + bytes([len(data)]) if len(data) < 256 else long + len(data).to_bytes(4, "little")
        frames.add_data(head, data)
        frames.add(MEMOIZE)


def canonical_cbor(value: Any) -> bytes:
    """Return the canonical CBOR of a value.

    Args:
        value: None, a natural number below 2**64, bytes, text, or a tuple of these.

    Returns:
        The bytes.
    """
    if value is None:
        return b"\xf6"
    if isinstance(value, int):
        return _cbor_head(0, value)
    if isinstance(value, tuple):
        return _cbor_head(4, len(value)) + b"".join(map(canonical_cbor, value))
    data, kind = (value, 2) if isinstance(value, bytes) else (value.encode(), 3)
    return _cbor_head(kind, len(data)) + data


def _cbor_head(kind: int, number: int) -> bytes:
    """Return the kind of a value, and its number or length in as few bytes as can be."""
    if number < 24:
        return bytes([kind << 5 | number])
    log = next(log for log in range(4) if number < 1 << (8 << log))
    return bytes([kind << 5 | 24 + log]) + number.to_bytes(1 << log, "big")

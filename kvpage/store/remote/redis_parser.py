"""BulkParser: reads answers of Redis (RESP2) for redis-py, and large values straight into memory of their own.

    socket ─► buffer ─► lines and small values: bytes
       └───────────────► a large value: memoryview        each byte is copied once, by the kernel

redis-py's own parsers, hiredis too, gather a value in a buffer that grows, and copy it out: nearly half the time of a
GET of 32 MiB.
"""

import select
from typing import Any

import numpy as np

try:
    from redis._parsers import BaseParser
    from redis.exceptions import ConnectionError, InvalidResponse
except ImportError as error:
    raise ImportError("redis needs the package redis: pip install 'kvpage[redis]'") from error

BUFFER_BYTES = 1 << 16
MAX_BULK_BYTES = 512 << 20  # the protocol's, unless the server is told otherwise
CLOSED = "Connection closed by server."


class BulkParser(BaseParser):
    """A parser of one connection at a time. An error closes the connection, since the rest of an answer may follow."""

    def __init__(self, socket_read_size: int) -> None:
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._begin = self._end = 0  # of the bytes that have come and are not yet read
        self._sock: Any = None

    def on_connect(self, connection: Any) -> None:
        self._sock = connection._sock
        self._begin = self._end = 0

    def on_disconnect(self) -> None:
        self._sock = None

    def can_read(self, timeout: float = 0) -> bool:
        """Return whether bytes have come, or the end."""
        sock = self._open_socket()
        if self._begin < self._end or (hasattr(sock, "pending") and sock.pending()):
            return True
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        return bool(poll.poll(timeout * 1000))

    def read_response(self, disable_decoding: bool = False, **others: Any) -> Any:
        """Return an answer: bytes, or a memoryview of a large value; an int, a list, None; an error of the server."""
        line = self._line()
        kind, text = line[:1], line[1:]
        if kind == b"$":
            return self._bulk(int(text))
        if kind == b":":
            return int(text)
        if kind == b"+":
            return text
        if kind == b"*":
            return None if text == b"-1" else [self.read_response() for _ in range(int(text))]
        if kind == b"-":
            parser: Any = self  # redis-py's class has no types
            error: Exception = parser.parse_error(text.decode(errors="replace"))
            if isinstance(error, ConnectionError):
                raise error
            return error
        raise InvalidResponse(f"an answer must begin with one of +-:$*, got {line[:20]!r}")

    def _line(self) -> bytes:
        """Return a line without its end."""
        searched = 0
        while True:
            come = bytes(self._buffer[self._begin : min(self._end, self._begin + 4096)])
            end = come.find(b"\r\n", searched)
            if end >= 0:
                self._begin += end + 2
                return come[:end]
            if len(come) == 4096:
                raise InvalidResponse(f"a line must be shorter than 4096 bytes, got {come[:20]!r}")
            searched = max(len(come) - 1, 0)
            self._fill()

    def _bulk(self, num_bytes: int) -> bytes | memoryview | None:
        if num_bytes == -1:
            return None
        if not 0 <= num_bytes <= MAX_BULK_BYTES:
            raise InvalidResponse(f"a value must have at most {MAX_BULK_BYTES} bytes, got {num_bytes}")
        value = self._take(num_bytes) if num_bytes + 2 <= BUFFER_BYTES else self._receive(num_bytes)
        if self._take(2) != b"\r\n":
            raise InvalidResponse("a value must end in a new line")
        return value

    def _take(self, num_bytes: int) -> bytes:
        while self._end - self._begin < num_bytes:
            self._fill()
        self._begin += num_bytes
        return bytes(self._buffer[self._begin - num_bytes : self._begin])

    def _receive(self, num_bytes: int) -> memoryview:
        value = np.empty(num_bytes, np.uint8).data
        at = min(self._end - self._begin, num_bytes)
        value[:at] = self._buffer[self._begin : self._begin + at]
        self._begin += at
        while at < num_bytes:
            at += self._receive_into(value[at:])
        return value

    def _fill(self) -> None:
        if self._begin:  # the rest goes to the front: little, since large values do not pass here
            left = bytes(self._buffer[self._begin : self._end])
            self._buffer[: len(left)] = left
            self._begin, self._end = 0, len(left)
        self._end += self._receive_into(self._buffer[self._end :])

    def _receive_into(self, room: memoryview) -> int:
        num_bytes: int = self._open_socket().recv_into(room)
        if num_bytes == 0:
            raise ConnectionError(CLOSED)
        return num_bytes

    def _open_socket(self) -> Any:
        sock = self._sock  # another thread may close it
        if sock is None:
            raise ConnectionError(CLOSED)
        return sock

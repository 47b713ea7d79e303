"""BoundedHttp: uvicorn's HTTP, which waits for slow clients no longer than some time, and bounds the head of a request.

a head    64 KiB, and HEAD_TIMEOUT from its first byte on; before it, the time that connections are kept
a body    BODY_TIMEOUT from one part to the next; its size is the Gate's
answers   `send_timeout` in which a client reads nothing of its answer
"""

import asyncio
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 2**10
"""Read before a head must have ended. One more read may come: the last one may hold part of a body."""

HEAD_TIMEOUT, BODY_TIMEOUT = 30.0, 60.0  # seconds


class BoundedHttp(HttpToolsProtocol):
    """One connection. Bytes are counted while the head of a request comes; bodies are the Gate's.

    send_timeout: Seconds; None for any time.
    """

    def __init__(self, *arguments: Any, send_timeout: float | None = None, **fields: Any) -> None:
        super().__init__(*arguments, **fields)
        self._num_head_bytes: int | None = 0  # None within a body
        self._send_timeout = send_timeout
        self._reading: asyncio.TimerHandle | None = None  # ends the wait for the rest of a request
        self._writing: asyncio.TimerHandle | None = None  # the same for a client that reads

    def connection_made(self, transport: Any) -> None:
        """Wait for the first request."""
        super().connection_made(transport)
        self._read_within(self.timeout_keep_alive)

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing any more."""
        self._read_within(None)
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take the bytes that have come."""
        if self._num_head_bytes is not None:
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self.send_400_response(f"the head of a request must be at most {MAX_HEAD_BYTES} bytes")
                return
            if not self._num_head_bytes or self._reading is None:
                self._read_within(HEAD_TIMEOUT)
            self._num_head_bytes += len(data)
        else:
            self._read_within(BODY_TIMEOUT)
        super().data_received(data)

    def on_url(self, url: bytes) -> None:
        """Take a part of the path. Only proxies get whole URLs, whose host may be another than the header's."""
        if not self.url and not url.startswith((b"/", b"*")):
            raise httptools.HttpParserError("a path must begin with /")
        super().on_url(url)

    def on_headers_complete(self) -> None:
        """Begin the body."""
        self._num_head_bytes = None
        self._read_within(BODY_TIMEOUT)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """End the request; the next one may follow."""
        self._num_head_bytes = 0
        self._read_within(None)
        super().on_message_complete()

    def _unsupported_upgrade_warning(self) -> None:
        """Say nothing: any client may ask for WebSockets, and gets an answer without them."""

    def pause_writing(self) -> None:
        """Begin to wait for a client that does not read."""
        super().pause_writing()
        if self._send_timeout is not None and self._writing is None:
            self._expect_reads(self._send_timeout)

    def resume_writing(self) -> None:
        """Go on: it has read."""
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None
        super().resume_writing()

    def _expect_reads(self, seconds: float) -> None:
        size = self.transport.get_write_buffer_size()
        self._writing = self.loop.call_later(seconds, self._on_unread, seconds, size)

    def _on_unread(self, seconds: float, size: int) -> None:
        """End the connection, unless some of the bytes that waited have been read since."""
        if self.transport.get_write_buffer_size() < size:
            self._expect_reads(seconds)
        else:
            self.transport.abort()

    def _read_within(self, seconds: float | None) -> None:
        """Have the connection end unless something comes in time. None: nothing is waited for."""
        if self._reading is not None:
            self._reading.cancel()
        self._reading = None if seconds is None else self.loop.call_later(seconds, self._on_silence, seconds)

    def _on_silence(self, seconds: float) -> None:
        is_head = self._num_head_bytes is not None
        if self.flow.read_paused or self.pipeline or (is_head and self._answers):  # the server is the one that waits
            self._read_within(seconds)
        else:
            self.transport.abort()

    @property
    def _answers(self) -> bool:
        """Whether an answer is under way: bytes that come meanwhile are of the next request."""
        return self.cycle is not None and not self.cycle.response_complete

"""BoundedHttp: uvicorn's HTTP, which refuses a request whose head does not end."""

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 2**10
"""Read before a head must have ended. One more read may come: the last one may hold part of a body."""


class BoundedHttp(HttpToolsProtocol):
    """One connection. Bytes are counted while the head of a request comes; bodies are the Gate's."""

    def __init__(self, *arguments: Any, **fields: Any) -> None:
        super().__init__(*arguments, **fields)
        self._num_head_bytes: int | None = 0  # None within a body

    def data_received(self, data: bytes) -> None:
        """Take what has come."""
        if self._num_head_bytes is not None:
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self.send_400_response(f"the head of a request must be at most {MAX_HEAD_BYTES} bytes")
                return
            self._num_head_bytes += len(data)
        super().data_received(data)

    def on_headers_complete(self) -> None:
        """Begin the body."""
        self._num_head_bytes = None
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """End the request; the next one may follow."""
        self._num_head_bytes = 0
        super().on_message_complete()

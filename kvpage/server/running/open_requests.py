"""OpenRequests: the requests that are read, wait or run now, and the bytes of their bodies.

    place ─► body, piece by piece: take ─► work ─► answer ─► the place is free

Whatever a request costs before the engine has it is bounded here: beyond the limits it is refused, and nothing is kept.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from kvpage.server.protocol.errors import busy


class OpenRequests:
    """The requests that are open. All methods are for the thread of the event loop.

    Args:
        max_requests: Requests at once at most.
        max_bytes: Bytes of all their bodies at most.

    Attributes:
        num_open: Requests now.
        num_bytes: Bytes of their bodies that were read so far.
    """

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        self.num_open, self.num_bytes = 0, 0
        self._max_requests, self._max_bytes = max_requests, max_bytes

    @contextmanager
    def place(self) -> Iterator["Place"]:
        """Count a request within the block. ApiError 503 beyond the limit."""
        if self.num_open >= self._max_requests:
            raise busy(f"{self.num_open} requests are open, which is the most", 1)
        open_request = Place(self)
        self.num_open += 1
        try:
            yield open_request
        finally:
            self.num_open -= 1
            self.num_bytes -= open_request.num_bytes

    def take(self, num_bytes: int) -> None:
        """Count bytes of a body. ApiError 503 beyond the limit."""
        if self.num_bytes + num_bytes > self._max_bytes:
            raise busy(f"the bodies of open requests have {self.num_bytes} of at most {self._max_bytes} bytes", 1)
        self.num_bytes += num_bytes


class Place:
    """The place of one request.

    Args:
        requests: All of them.

    Attributes:
        num_bytes: Bytes of its body that were read so far.
    """

    def __init__(self, requests: OpenRequests) -> None:
        self.num_bytes, self._requests = 0, requests

    def take(self, num_bytes: int) -> None:
        """Count the next bytes of its body. ApiError 503 beyond the limit of all bodies."""
        self._requests.take(num_bytes)
        self.num_bytes += num_bytes

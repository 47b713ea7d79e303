"""WholeAnswer: an answer as one piece of JSON. Its request stays open until the client has read nearly all of it."""

from collections.abc import Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvpage.server.answers.event_stream import parts_of


class WholeAnswer(Response):
    """The JSON of a whole answer.

    Args:
        content: The JSON.
        end: Called once, after the last part or when sending has failed.
    """

    media_type = "application/json"

    def __init__(self, content: bytes, end: Callable[[], object]) -> None:
        super().__init__(content)
        self._content, self._end = content, end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer, part by part: the server waits between them while the client does not read."""
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            for part in parts_of(self._content):
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._end()

"""EventStream and WholeAnswer: answers that are sent part by part, and end when their readers go."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvpage.server.access.request_log import CLIENT_GONE
from kvpage.server.protocol.errors import ApiError

Result = TypeVar("Result")
PART_BYTES = 2**16
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class EventStream(Response):
    """Server-sent events. When the client goes, the iterator is cancelled where it is.

    Args:
        events: The events, ready to be sent.
        end: Called once, after the last event or when the client has gone.
        send_timeout: Seconds that a client which does not read may hold up an event; then it has gone, too. None for
            any time.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes, None], end: Callable[[], object], send_timeout: float | None = None
    ) -> None:
        super().__init__(None, 200, HEADERS)
        if "content-length" in self.headers:
            del self.headers["content-length"]
        self._events, self._end, self._send_timeout = events, end, send_timeout
        self._sends_since: float | None = None  # seconds of the loop's clock since which an event is held up

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        sending = asyncio.ensure_future(self._send(send))
        others = [asyncio.ensure_future(until_gone(receive))]
        if self._send_timeout is not None:
            others.append(asyncio.ensure_future(self._until_stuck(self._send_timeout)))
        try:
            await asyncio.wait((sending, *others), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            try:
                await end_tasks(sending, *others)
            finally:
                try:
                    await self._events.aclose()
                finally:
                    self._end()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        clock = asyncio.get_running_loop().time
        async for event in self._events:
            for part in parts_of(event):
                self._sends_since = clock()
                await send({"type": "http.response.body", "body": part, "more_body": True})
                self._sends_since = None
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _until_stuck(self, timeout: float) -> None:
        """Return once an event is held up for `timeout` seconds. One timer serves all events."""
        clock = asyncio.get_running_loop().time
        while True:
            since = self._sends_since
            await asyncio.sleep(timeout if since is None else since + timeout - clock())
            if since is not None and self._sends_since == since:
                return


def parts_of(content: bytes) -> Iterator[bytes]:
    """Yield the parts of bytes that are sent one by one: a client that reads them slowly is seen to read."""
    for begin in range(0, len(content), PART_BYTES):
        yield content[begin : begin + PART_BYTES]


async def until_gone(receive: Receive) -> None:
    """Return once the client has gone. The body was read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def end_tasks(*tasks: "asyncio.Future[Any]") -> None:
    """Cancel the tasks, and wait for their ends."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def unless_gone(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of work. If the client goes before it is there, the work is cancelled, wherever it waits."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(until_gone(request.receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ApiError(CLIENT_GONE, "the client has gone", code="client_gone")
    finally:
        await end_tasks(working, leaving)


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

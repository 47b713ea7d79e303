"""RequestLog: every HTTP request is named, counted and, if asked for, logged, however it ends.

request ─► RequestLog: id, time ─► Gate ─► routes ─► answer with X-Request-Id and X-Ignored-Fields ─► counts, a line
"""

import logging
import secrets
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from starlette.datastructures import Headers, MutableHeaders

from kvpage.server.access.gate import App, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)
RECORD = "kvpage.record"  # its place in the scope of a request
CLIENT_GONE = 499
MAX_ID, MAX_NAME, MAX_SHOWN = 256, 80, 32
MAX_COUNTED = 256  # names of ignored fields that have a count of their own; clients choose them
OTHER = "other"


@dataclass(slots=True)
class RequestRecord:
    """One HTTP request.

    Attributes:
        request_id: The client's header X-Request-Id, or a new one.
        status: Of the answer, once it has begun.
        is_whole: Whether the answer was sent to its end.
        ignored: The fields of the body that were left aside.
    """

    request_id: str
    status: int | None = None
    is_whole: bool = False
    ignored: set[str] = field(default_factory=set)

    def answer_headers(self) -> dict[str, str]:
        """Return the headers that it adds to its answer."""
        shown = [_printable(name) for name in sorted(self.ignored)[:MAX_SHOWN]]
        ignored = {"x-ignored-fields": ", ".join(shown)} if shown else {}
        return {"x-request-id": self.request_id, **ignored}

    @property
    def outcome(self) -> int:
        """The status; 499 where the client went before its end, and 500 where there was no answer."""
        if self.status is None:
            return 500
        return self.status if self.is_whole else CLIENT_GONE


class HttpCounts:
    """Requests by path and status, and the fields that were left aside. For the thread of the event loop.

    requests: by (path, status). ignored_fields: by name; fields of later names together.
    """

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        self.ignored_fields: Counter[str] = Counter()

    def note(self, path: str, record: RequestRecord) -> None:
        """Count a request that has ended."""
        self.requests[path, record.outcome] += 1
        for name in map(_printable, record.ignored):
            is_known = name in self.ignored_fields or len(self.ignored_fields) < MAX_COUNTED
            self.ignored_fields[name if is_known else OTHER] += 1


class RequestLog:
    """An ASGI application in front of another one.

    Args:
        app: The other one.
        counts: Where requests are counted.
        paths: The paths that are counted by their names; all others count together.
        logs: Whether each request is a line in the log.
    """

    def __init__(self, app: App, counts: HttpCounts, paths: Iterable[str], logs: bool) -> None:
        self._app, self._counts, self._paths, self._logs = app, counts, frozenset(paths), logs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = scope[RECORD] = RequestRecord(_request_id(Headers(scope=scope)))
        begin = time.monotonic()

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                MutableHeaders(scope=message).update(record.answer_headers())
            elif not message.get("more_body", False):
                record.is_whole = True
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            self._note(scope, record, time.monotonic() - begin)

    def _note(self, scope: Scope, record: RequestRecord, seconds: float) -> None:
        path = scope["path"]
        self._counts.note(path if path in self._paths else OTHER, record)
        if self._logs:
            client = (scope.get("client") or ("-",))[0]
            logger.info(
                "%s %s %s %d %.1f ms %s", client, scope["method"], _printable(path), record.outcome, 1e3 * seconds,
                record.request_id,
            )  # fmt: skip


def record_of(scope: Scope) -> RequestRecord:
    """Return the record of a request, by its scope."""
    record = scope[RECORD]
    assert isinstance(record, RequestRecord), "the log puts it there"
    return record


def _request_id(headers: Headers) -> str:
    return _printable(headers.get("x-request-id", "")[:MAX_ID], MAX_ID) or secrets.token_hex(16)


def _printable(text: str, most: int = MAX_NAME) -> str:
    """Return text for a header or a line of a log: others choose it."""
    return "".join(character if character.isascii() and character.isprintable() else "?" for character in text[:most])

"""A client of OpenAI's API that costs its machine little: it notes when bytes come, and reads them afterwards.

The server and the client share the cores of a small machine. So while a load runs, a token costs the client one call.
"""

import asyncio
import json
import re
import ssl
import time
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any
from urllib.parse import urlsplit

MOST_WORDS = 300  # characters of an error that are shown
EVENT = re.compile(rb"(.*?)\r?\n\r?\n", re.DOTALL)


class ServeError(Exception):
    """A server that cannot be reached or gives no answer in time, or an answer that is none of HTTP."""


@dataclass(slots=True)
class Reply:
    """An answer as it came. reads: time.perf_counter() and bytes of each read. error: why there is none."""

    begin: float
    reads: list[tuple[float, bytes]] = field(default_factory=list)
    end: float = 0.0
    is_aborted: bool = False
    error: str = ""

    def split(self) -> tuple[bytes, bytes]:
        """Return the status line with the headers, and the bytes after them."""
        head, _, rest = b"".join(data for _, data in self.reads).partition(b"\r\n\r\n")
        return head, rest

    @property
    def status(self) -> int:
        """The status code. ServeError if there is none."""
        head, _ = self.split()
        match = re.match(rb"HTTP/1\.[01] (\d{3})", head)
        if match is None:
            raise ServeError(f"the server closed the connection after {len(head)} bytes")
        return int(match[1])

    def parts(self) -> Iterator[tuple[int, bytes]]:
        """Yield the parts of the body, without the framing of chunks, each with its place among the bytes."""
        head, rest = self.split()
        begin, at = len(head) + 4, 0
        if b"transfer-encoding: chunked" not in head.lower():
            yield begin, rest
            return
        while (end := rest.find(b"\r\n", at)) >= 0:
            size, at = int(rest[at:end].partition(b";")[0], 16), end + 2
            yield begin + at, rest[at : at + size]
            at += size + 2

    def text(self) -> bytes:
        """Return the body."""
        return b"".join(part for _, part in self.parts())

    def check(self) -> None:
        """Raise ServeError for another status than 200, with the words of the server's error."""
        if self.error:
            raise ServeError(self.error)
        if self.status != 200:
            text = self.text()
            try:
                words = words_of(as_object(text))
            except ServeError:
                words = text[:MOST_WORDS].decode(errors="replace")
            raise ServeError(f"status {self.status}: {words}")

    def events(self) -> list[tuple[float, Any]]:
        """Return the events of a stream but for [DONE]: when the last byte of each came, and its JSON."""
        places = [at for begin, part in self.parts() for at in range(begin, begin + len(part))]
        read_ends, events = list(accumulate(len(data) for _, data in self.reads)), []
        for event in EVENT.finditer(self.text()):
            text = event[1].partition(b"data:")[2].strip()
            if text and text != b"[DONE]":
                when, _ = self.reads[bisect_right(read_ends, places[event.end() - 1])]
                events.append((when, as_object(text)))
        return events


def as_object(text: bytes) -> dict[str, Any]:
    """Return the JSON object of a text. ServeError for anything else."""
    with suppress(ValueError):
        value = json.loads(text)
        if isinstance(value, dict):
            return value
    raise ServeError(f"{text[:200]!r} is no JSON object")


def words_of(answer: dict[str, Any]) -> str:
    """Return the words of an error in OpenAI's shape, or in another one."""
    error = answer.get("error") or answer
    return str(error.get("message", error) if isinstance(error, dict) else error)[:MOST_WORDS]


class _Call(asyncio.Protocol):
    """One request on a connection of its own. leaves_after: reads of the body after which the client goes away."""

    def __init__(self, request: bytes, reply: Reply, leaves_after: int | None) -> None:
        self._request, self._reply, self._leaves_after = request, reply, leaves_after
        self._transport: Any = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        reply = self._reply
        reply.reads.append((time.perf_counter(), data))
        if self._leaves_after is not None and len(reply.reads) > self._leaves_after:
            reply.is_aborted = True
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._reply.end = time.perf_counter()
        if not self.done.done():
            self.done.set_result(None)


class ServeClient:
    """Calls one server. url: with or without /v1. timeout: seconds that an answer may take."""

    def __init__(self, url: str, api_key: str | None = None, timeout: float = 600.0) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url must be like http://127.0.0.1:8000, got {url!r}")
        self._host, self._tls = parts.hostname, ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._root = parts.path.rstrip("/").removesuffix("/v1")
        name = f"[{self._host}]" if ":" in self._host else self._host
        key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._headers = f"Host: {name}:{self._port}\r\n{key}Content-Type: application/json\r\nConnection: close\r\n"
        self._timeout = timeout

    def request(self, method: str, path: str, body: Any = None) -> bytes:
        """Return the bytes of a request."""
        data = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {self._root}{path} HTTP/1.1\r\n{self._headers}Content-Length: {len(data)}\r\n\r\n"
        return head.encode() + data

    async def call(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """Send a request; return the JSON object of the answer. ServeError as for `send`, or for a refusal."""
        reply = await self.send(self.request(method, path, body))
        reply.check()
        return as_object(reply.text())

    async def send(self, request: bytes, begin: float | None = None, leaves_after: int | None = None) -> Reply:
        """Send the bytes of a request; return the whole answer. ServeError: nobody answers, or not in time.

        begin: when it should have been sent; None for now. leaves_after: reads after which the client goes away.
        """
        reply = Reply(time.perf_counter() if begin is None else begin)
        try:
            await asyncio.wait_for(self._exchange(_Call(request, reply, leaves_after)), self._timeout)
        except (TimeoutError, asyncio.TimeoutError) as error:  # two classes before Python 3.11
            raise ServeError(f"no answer within {self._timeout:g} s") from error
        except OSError as error:
            raise ServeError(f"no server at {self._host}:{self._port}: {error}") from error
        return reply

    async def _exchange(self, call: _Call) -> None:
        """Connect, and wait for the connection's end. A cancellation closes it."""
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_connection(lambda: call, self._host, self._port, ssl=self._tls)
        try:
            await call.done
        finally:
            transport.abort()

"""A server of raw bytes on a port of its own, and answers in the shape of OpenAI's completions."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

Answer = Callable[[str, Any], Iterable[bytes | float]]
"""Gives the parts of an answer to (path, JSON of the body). A number is a pause in seconds."""
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5, "prompt_tokens_details": {"cached_tokens": 1}}
MODELS = {"object": "list", "data": [{"id": "model"}, {"id": "other"}]}


def whole(body: Any, status: int = 200) -> bytes:
    """Return an answer with JSON and its length."""
    data = json.dumps(body).encode()
    return f"HTTP/1.1 {status} X\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


def chunk(data: bytes) -> bytes:
    """Return a chunk of a body."""
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def event(body: Any) -> bytes:
    """Return an event of a stream."""
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def stream(events: Sequence[bytes]) -> list[bytes]:
    """Return the parts of a chunked answer, one an event."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    return [head, *map(chunk, events), b"0\r\n\r\n"]


def text_events(texts: Sequence[str], usage: Any = USAGE) -> list[bytes]:
    """Return the events of a completion."""
    last = [] if usage is None else [event({"choices": [], "usage": usage})]
    return [*(event({"choices": [{"index": 0, "text": text}]}) for text in texts), *last, b"data: [DONE]\n\n"]


def usage_of(body: Any) -> dict[str, int]:
    """Return the usage of a completion that has as many tokens as were asked for."""
    num_prompt, num_output = len(body["prompt"]), body["max_tokens"]
    return {"prompt_tokens": num_prompt, "completion_tokens": num_output, "total_tokens": num_prompt + num_output}


def completions(path: str, body: Any) -> Iterable[bytes | float]:
    """Answer as a server with two models does, whose tokens are all "a"."""
    if path == "/v1/models":
        return [whole(MODELS)]
    if body.get("stream"):
        return stream(text_events(["a"] * body["max_tokens"], usage_of(body)))
    return [whole({"choices": [{"index": 0, "text": "a" * body["max_tokens"]}], "usage": usage_of(body)})]


class RawServer:
    """Answers each request, then closes its connection.

    Attributes:
        url: Where it listens.
        requests: Head and body of each request.
        num_left: Clients that went away before the answer's end.
    """

    def __init__(self, answer: Answer) -> None:
        self._answer, self.requests, self.num_left, self.url = answer, [], 0, ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.lower().partition("content-length: ")[2].partition("\r\n")[0])
        data = await reader.readexactly(length)
        body = json.loads(data) if data else None
        self.requests.append((head, body))
        try:
            for part in self._answer(head.split()[1], body):
                if isinstance(part, float):
                    await asyncio.sleep(part)
                    continue
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0)
        except ConnectionError:
            self.num_left += 1
        writer.close()


@contextlib.contextmanager
def raw_server(answer: Answer = completions) -> Iterator[RawServer]:
    """Run a server in a thread."""
    server, loop, started = RawServer(answer), asyncio.new_event_loop(), threading.Event()

    async def run() -> None:
        async with await asyncio.start_server(server.serve, "127.0.0.1", 0) as listening:
            server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
            server.stop = asyncio.Event()
            started.set()
            await server.stop.wait()

    thread = threading.Thread(target=lambda: asyncio.set_event_loop(loop) or loop.run_until_complete(run()))
    thread.start()
    started.wait()
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(server.stop.set)
        thread.join()
        loop.close()

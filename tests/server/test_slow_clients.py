"""Clients that do not read, or do not send: they hold nothing for longer than a configured time."""

import asyncio
import json
import threading
from types import SimpleNamespace

import pytest
import uvicorn
from support.server_app import NAME, running_server
from uvicorn.server import ServerState

from kvpage.server import ServerConfig
from kvpage.server.access.request_log import CLIENT_GONE
from kvpage.server.answers.responses import EventStream
from kvpage.server.command import bounded_http
from kvpage.server.command.bounded_http import BoundedHttp
from kvpage.server.protocol.errors import ApiError

REQUEST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n"


class Client:
    """An ASGI client that takes `seconds` for each event; it never goes by itself."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.events = seconds, []

    async def receive(self) -> dict:
        await asyncio.get_running_loop().create_future()

    async def send(self, message: dict) -> None:
        if message["type"] == "http.response.body":
            await asyncio.sleep(self.seconds)
            self.events.append(message["body"])


async def three_events():
    for event in (b"1", b"2", b"3"):
        yield event


@pytest.mark.parametrize(("seconds", "timeout", "num_sent"), [(1e4, 0.01, 0), (0.02, 10.0, 4), (0.0, None, 4)])
def test_a_stream_ends_where_its_client_reads_nothing(seconds, timeout, num_sent):
    async def main() -> None:
        client, ends = Client(seconds), []
        stream = EventStream(three_events(), lambda: ends.append(1), timeout)
        await stream({"type": "http"}, client.receive, client.send)
        assert len(client.events) == num_sent and ends == [1]

    asyncio.run(main())


def test_a_request_whose_client_reads_nothing_gives_its_place_back():
    body = {"prompt": "the fox", "max_tokens": 20, "stream": True}

    async def ask(server) -> None:
        client = Client(1e4)
        scope = {
            "type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "root_path": "",
            "headers": [(b"content-type", b"application/json")], "app": server.app,
        }  # fmt: skip
        messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

        async def receive() -> dict:
            return messages.pop() if messages else await client.receive()

        await server.app(scope, receive, client.send)

    with running_server(ServerConfig([NAME], send_timeout=0.01)) as server:
        asyncio.run(ask(server))
        assert server.app.state.service.open_requests.num_open == 0


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_before_its_prompt_is_read_is_noticed(stream):
    body = json.dumps({"prompt": "the fox", "max_tokens": 2, "stream": stream}).encode()
    is_over = threading.Event()

    async def ask(server) -> list[int]:
        messages = [{"type": "http.disconnect"}, {"type": "http.request", "body": body, "more_body": False}]
        sent = []

        async def receive() -> dict:
            return messages.pop() if len(messages) > 1 else messages[0]

        async def send(message: dict) -> None:
            sent.append(message.get("status"))

        scope = {
            "type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "root_path": "",
            "headers": [(b"content-type", b"application/json")], "app": server.app,
        }  # fmt: skip
        await asyncio.wait_for(server.app(scope, receive, send), 120)
        return sent

    with running_server(ServerConfig([NAME], num_tokenizer_threads=1)) as server:
        service = server.app.state.service
        held = service.text._pool.submit(is_over.wait)
        try:
            assert asyncio.run(ask(server))[0] == CLIENT_GONE
            assert service.open_requests.num_open == 0 and not held.done()
        finally:
            is_over.set()
        service.close()
        with pytest.raises(ApiError, match="the server is closing") as caught:
            asyncio.run(service.compile(lambda: None))
        assert caught.value.status == 503


def test_events_that_fail_to_close_keep_no_place():
    async def events():
        try:
            yield b"1"
            await asyncio.get_running_loop().create_future()
        finally:
            raise OSError("boom")

    async def main() -> None:
        client, ends, made = Client(1e4), [], events()
        stream = EventStream(made, lambda: ends.append(1), 0.01)
        with pytest.raises(OSError, match="boom"):
            await stream({"type": "http"}, client.receive, client.send)
        assert ends == [1]

    asyncio.run(main())


class Transport:
    """A transport that notes whether it was aborted.

    sizes: of what waits to be read, one a look; the last one stays.
    """

    def __init__(self) -> None:
        self.aborted, self.sizes = asyncio.Event(), [1]

    def get_write_buffer_size(self) -> int:
        return self.sizes.pop(0) if len(self.sizes) > 1 else self.sizes[0]

    def abort(self) -> None:
        self.aborted.set()

    def is_closing(self) -> bool:
        return False

    def get_extra_info(self, name: str, default: object = None) -> object:
        return default

    def __getattr__(self, name: str):
        return lambda *arguments: None


def connected(**fields) -> tuple[BoundedHttp, Transport]:
    async def app(scope, receive, send) -> None:
        await asyncio.get_running_loop().create_future()

    config = uvicorn.Config(app, log_config=None, lifespan="off", timeout_keep_alive=bounded_http.HEAD_TIMEOUT)
    made, transport = BoundedHttp(config=config, server_state=ServerState(), app_state={}, **fields), Transport()
    made.connection_made(transport)
    return made, transport


def close(made: BoundedHttp) -> None:
    made.connection_lost(None)
    assert made._reading is made._writing is None
    for task in made.tasks:
        task.cancel()


def test_a_client_that_reads_nothing_is_cut_off():
    async def main() -> None:
        made, transport = connected(send_timeout=0.01)
        made.pause_writing()
        made.resume_writing()
        assert made._writing is None
        made.pause_writing()
        await transport.aborted.wait()
        close(made)
        made, transport = connected()
        made.pause_writing()
        assert made._writing is None, "any time is allowed"
        close(made)

    asyncio.run(main())


def test_a_client_that_reads_slowly_is_not_cut_off():
    async def main() -> None:
        made, transport = connected(send_timeout=0.001)
        transport.sizes = [100, 90, 90, 80, 80, 80]
        made.pause_writing()
        await transport.aborted.wait()
        assert transport.sizes == [80], "it was looked at until nothing was read"
        close(made)

    asyncio.run(main())


@pytest.mark.parametrize("more", [b"\r\n", b"GET /next"])
def test_bytes_after_a_request_do_not_end_its_answer(more):
    async def main() -> None:
        made, transport = connected()
        made.data_received(REQUEST + b"123456789")
        made.data_received(more)
        made._on_silence(30.0)
        assert not transport.aborted.is_set(), "the answer is under way"
        made.cycle.response_complete = True
        made._on_silence(30.0)
        assert transport.aborted.is_set()
        close(made)

    asyncio.run(main())


def test_a_connection_may_be_kept_before_its_first_request(monkeypatch):
    async def main() -> None:
        waits: list[float] = []
        monkeypatch.setattr(BoundedHttp, "_read_within", lambda made, seconds: waits.append(seconds))
        made, _ = connected()
        made.timeout_keep_alive = 65
        made.connection_made(Transport())
        made.data_received(b"GET / HT")
        assert waits[1:] == [65, bounded_http.HEAD_TIMEOUT]
        made.connection_lost(None)

    asyncio.run(main())


@pytest.mark.parametrize("sent", [b"", b"GET / HT", REQUEST, REQUEST + b"{"])
def test_a_client_that_sends_no_more_is_cut_off(monkeypatch, sent):
    monkeypatch.setattr(bounded_http, "HEAD_TIMEOUT", 0.01)
    monkeypatch.setattr(bounded_http, "BODY_TIMEOUT", 0.01)

    async def main() -> None:
        made, transport = connected()
        made.data_received(sent) if sent else None
        await transport.aborted.wait()
        close(made)

    asyncio.run(main())


def test_a_whole_request_may_be_computed_for_any_time():
    async def main() -> None:
        made, transport = connected()
        made.data_received(REQUEST + b"123456789")
        assert made._reading is None
        made.data_received(b"GET /next")
        assert made._reading is not None
        made.flow = SimpleNamespace(read_paused=True, resume_writing=lambda: None)
        made._on_silence(30.0)
        assert not transport.aborted.is_set(), "the server waits, not the client"
        close(made)

    asyncio.run(main())

"""Each HTTP request has an id, a count and, if asked for, a line, however it ends."""

import asyncio
import json
import logging

import pytest
from prometheus_client.exposition import generate_latest
from server.test_bad_input import CHATS, COMPLETIONS, GOOD
from support.server_app import NAME, running_server
from support.waiting import until

from kvpage.server import ServerConfig
from kvpage.server.access.request_log import MAX_COUNTED, HttpCounts, RequestRecord


def counted(server, path: str, status: int) -> float:
    labels = {"model_name": NAME, "path": path, "status": str(status)}
    return server.app.state.registry.get_sample_value("kvpage_http_requests_total", labels) or 0


def test_answers_have_the_id_of_their_request(server):
    for path, body in ((COMPLETIONS, GOOD[COMPLETIONS]), (CHATS, {**GOOD[CHATS], "stream": True}), (CHATS, {})):
        given = asyncio.run(server.post(path, body, **{"x-request-id": "mine"}))
        assert given.headers["x-request-id"] == "mine"
        others = {asyncio.run(server.post(path, body)).headers["x-request-id"] for _ in range(2)}
        assert len(others) == 2 and all(len(one) == 32 for one in others)
    answer = asyncio.run(server.post(COMPLETIONS, GOOD[COMPLETIONS], **{"x-request-id": "mine"})).json()
    assert answer["id"] == "cmpl-mine"


def test_outcomes_are_counted(server):
    cases = [(COMPLETIONS, GOOD[COMPLETIONS], 200), (COMPLETIONS, {}, 400), (CHATS, {**GOOD[CHATS], "model": "x"}, 404)]
    for path, body, status in cases:
        before = counted(server, path, status)
        assert asyncio.run(server.post(path, body)).status_code == status
        assert counted(server, path, status) == before + 1
    before = counted(server, "other", 404)
    asyncio.run(server.post("/nowhere/at/all", {}))
    assert counted(server, "other", 404) == before + 1


def test_refusals_of_a_full_server_are_counted():
    with running_server(ServerConfig([NAME], max_open_requests=1)) as server:

        async def ask() -> list[int]:
            each = [server.post(COMPLETIONS, {"prompt": "x", "max_tokens": 20}) for _ in range(5)]
            return [answer.status_code for answer in await asyncio.gather(*each)]

        num_refused = asyncio.run(ask()).count(503)
        assert num_refused and counted(server, COMPLETIONS, 503) == num_refused


@pytest.mark.parametrize("stream", [False, True])
def test_clients_that_go_are_counted(server, stream):
    before = counted(server, COMPLETIONS, 499)

    async def ask() -> None:
        body = {"prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": stream}
        content, is_sent = json.dumps(body).encode(), False

        async def receive():
            nonlocal is_sent
            if is_sent:
                return {"type": "http.disconnect"}
            is_sent = True
            return {"type": "http.request", "body": content}

        async def send(message) -> None:
            pass

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": COMPLETIONS, "query_string": b"", "headers": headers}
        await server.app(scope, receive, send)

    asyncio.run(ask())
    assert counted(server, COMPLETIONS, 499) == before + 1
    until(lambda: server.live.stats().num_unfinished == 0)


def test_a_line_tells_path_status_time_and_id(caplog):
    with running_server(ServerConfig([NAME], access_log=True)) as server, caplog.at_level(logging.INFO):
        asyncio.run(server.post(COMPLETIONS, GOOD[COMPLETIONS], **{"x-request-id": "a\tb"}))
    [line] = [one.getMessage() for one in caplog.records if one.name.endswith("request_log")]
    client, method, path, status, _, unit, request_id = line.split(" ")
    assert (method, path, status, unit, request_id) == ("POST", COMPLETIONS, "200", "ms", "a?b")


def test_ignored_fields_are_named_and_counted(server):
    tool = {"type": "function", "cache_control": {}, "function": {"name": "f", "title": "F"}}
    odd = {
        "stream_options": {"more": 1},
        "tools": [tool],
        "provider": 1,
        "n\u00e4me\r\n": 1,
        "user": "me",
        "seed": None,
    }
    answer = asyncio.run(server.post(CHATS, {**GOOD[CHATS], **odd}))
    names = "n?me??, provider, stream_options.more, tools.cache_control, tools.function.title"
    assert answer.status_code == 200 and answer.headers["x-ignored-fields"] == names
    text = generate_latest(server.app.state.registry).decode()
    assert f'kvpage_http_ignored_fields_total{{field="tools.cache_control",model_name="{NAME}"}} 1.0' in text
    answer = asyncio.run(server.post("/tokenize", {"prompt": "x", "other": 1}))
    assert answer.headers["x-ignored-fields"] == "other"


def test_a_body_of_many_unknown_fields_names_some(server):
    tool = {"type": "function", "function": {"name": "f"}}
    tools = [{**tool, **{f"{number}-{i}": 1 for i in range(200)}} for number in range(20)]
    answer = asyncio.run(server.post(CHATS, {**GOOD[CHATS], "tools": tools, "suffix": "", "use_beam_search": False}))
    assert answer.status_code == 200 and len(answer.headers["x-ignored-fields"].split(", ")) == 32


def test_names_that_clients_make_up_are_counted_up_to_a_bound():
    counts = HttpCounts()
    for number in range(2 * MAX_COUNTED):
        counts.note("/", RequestRecord("id", 200, True, {f"name{number}"}))
    assert len(counts.ignored_fields) == MAX_COUNTED + 1 and counts.ignored_fields["other"] == MAX_COUNTED

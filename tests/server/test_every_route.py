# ruff: noqa: E501 - a body is read as one
"""What the server promises, on each route that generates: limits, errors, ends, counts; and bodies of any shape."""

import asyncio
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from server.test_bad_input import state
from support.agent_server import AgentServer, agent_server
from support.seeds import seed_of
from support.server_app import NAME, running_server
from support.waiting import until

from kvpage.server import ServerConfig
from kvpage.serving import AsyncEngineConfig

MESSAGES = [{"role": "user", "content": "the quick brown fox"}]
TOOL = {"type": "object", "properties": {"a": {"type": "string"}}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "the quick", "max_tokens": 2},
    "/v1/chat/completions": {
        "messages": MESSAGES, "max_tokens": 2, "tool_choice": "auto", "parallel_tool_calls": True,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": TOOL, "strict": None}}],
    },
    "/v1/responses": {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "y"}]},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "z"},
        ],
        "instructions": "be brief", "max_output_tokens": 2, "tools": [{"type": "function", "name": "f", "parameters": TOOL}],
        "tool_choice": "auto", "text": {"format": {"type": "text"}}, "reasoning": {"effort": "low"}, "store": False,
    },
    "/v1/messages": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "x"}]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "y"}, {"type": "tool_use", "id": "1", "name": "f", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "z"}]},
        ],
        "system": "be brief", "max_tokens": 2, "tools": [{"name": "f", "input_schema": TOOL}], "tool_choice": {"type": "auto"},
        "thinking": {"type": "disabled"}, "output_config": {"effort": "low"}, "stop_sequences": ["q"],
    },
}  # fmt: skip
PATHS = list(BODIES)


@pytest.fixture(scope="module")
def server() -> Iterator[AgentServer]:
    with agent_server("hermes", thinks=True) as made:
        yield made


def limit_of(path: str) -> str:
    return "max_output_tokens" if path == "/v1/responses" else "max_tokens"


def long_body(path: str) -> dict[str, Any]:
    """Return a body whose answer is long, without the guides of forms."""
    return {**BODIES[path], limit_of(path): 500, "ignore_eos": True, "stream": True}


@pytest.mark.parametrize("path", PATHS)
def test_a_body_is_answered_and_counted(server, path):
    for stream in (False, True):
        answer = asyncio.run(server.post(path, {**BODIES[path], "stream": stream}))
        assert answer.status_code == 200, answer.text
        kind = "text/event-stream" if stream else "application/json"
        assert answer.headers["content-type"].startswith(kind) and answer.headers["x-request-id"]
    lines = asyncio.run(server.get("/metrics")).text
    assert f'kvpage_http_requests_total{{model_name="{NAME}",path="{path}",status="200"}}' in lines


@pytest.mark.parametrize("path", PATHS)
def test_a_client_that_goes_leaves_nothing(server, path):
    before = state(server)[1:2]

    async def leave() -> None:
        sent, gone = asyncio.Event(), asyncio.Event()
        content = json.dumps(long_body(path)).encode()
        headers = [(b"content-type", b"application/json"), (b"host", b"server")]
        scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": path,
                 "raw_path": path.encode(), "query_string": b"", "root_path": "", "scheme": "http", "headers": headers,
                 "client": ("127.0.0.1", 1), "server": ("server", 80)}  # fmt: skip
        is_read = False

        async def receive() -> dict[str, Any]:
            nonlocal is_read
            if not is_read:
                is_read = True
                return {"type": "http.request", "body": content, "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        num_parts = 0

        async def send(message: dict[str, Any]) -> None:
            nonlocal num_parts
            num_parts += 1
            if num_parts == 4:
                sent.set()

        running = asyncio.ensure_future(server.app(scope, receive, send))
        await asyncio.wait_for(sent.wait(), 60)
        gone.set()
        await asyncio.wait_for(running, 60)

    asyncio.run(leave())
    until(lambda: not server.live.stats().num_unfinished)
    assert server.app.state.service.open_requests.num_open == 0
    assert state(server)[1:2] == before


@pytest.mark.parametrize("path", PATHS)
def test_limits_hold(path):
    config = ServerConfig([NAME], max_body_bytes=2000, max_open_requests=1, strict_fields=True)
    with running_server(config, AsyncEngineConfig(max_num_waiting=1)) as server:
        service = server.app.state.service

        def status(body: dict[str, Any], **headers: str) -> int:
            answer = asyncio.run(server.post(path, body, **headers))
            assert answer.status_code == 200 or answer.json()["error"]["message"]
            return answer.status_code

        assert status({**BODIES[path], "user": "x" * 2000}) == 413
        assert status({**BODIES[path], "frobnicate": 1}) == 400
        assert status({**BODIES[path], "model": "none"}) == 404
        assert status({**BODIES[path], "stream": "x"}) == 400
        assert status(BODIES[path], **{"content-type": "text/plain"}) == 415
        assert status({**BODIES[path], "priority": 2**40}) == 400
        with service.open_request():
            assert status(BODIES[path]) == 503
        service.begin_drain()
        assert status(BODIES[path]) == 503
        assert service.open_requests.num_open == 0 == service.open_requests.num_bytes


@pytest.mark.parametrize("path", PATHS)
def test_a_prompt_that_is_too_long_is_refused(server, path):
    long, name = (
        "fox " * 12_000,
        {"/v1/completions": "prompt", "/v1/responses": "instructions", "/v1/messages": "system"},
    )
    fields = {name[path]: long} if path in name else {"messages": [{"role": "user", "content": long}]}
    answer = asyncio.run(server.post(path, {**BODIES[path], **fields}))
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"


def changed(value: Any, draws: random.Random) -> Any:
    """Return a value with one part of it replaced by anything, or left out."""
    if isinstance(value, dict) and value and draws.random() < 0.85:
        name = draws.choice(sorted(value))
        rest = {key: part for key, part in value.items() if key != name}
        return rest if draws.random() < 0.1 else {**value, name: changed(value[name], draws)}
    if isinstance(value, list) and value and draws.random() < 0.85:
        index = draws.randrange(len(value))
        return [*value[:index], changed(value[index], draws), *value[index + 1 :]]
    return draws.choice([None, True, 0, -1, 2**70, 0.5, "", "x", [], {}, [[]], [{}], {"type": "x"}, {"x": [1]}, "required",
                         "function", {"type": "tool"}, {"type": "function", "name": "f"}])  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
def test_no_body_fails_the_server(server, path):
    draws, limit = random.Random(seed_of(3)), limit_of(path)

    async def ask_all() -> list[str]:
        wrong = []
        async with server.client() as client:
            for _ in range(150):
                body = BODIES[path]
                for _ in range(draws.randrange(1, 3)):
                    body = changed(body, draws)
                if isinstance(body, dict) and body.get(limit) in (None, -1, 2**70):
                    body = {**body, limit: 2}  # without one an answer is as long as the model allows
                answer = await client.post(path, json=body)
                if answer.status_code >= 500 or (answer.status_code != 200 and not answer.json()["error"]["message"]):
                    wrong.append(f"{answer.status_code}: {json.dumps(body)[:600]}")
        return wrong

    wrong = asyncio.run(ask_all())
    assert not wrong, "\n".join(wrong[:5])


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        ("/v1/responses", "response_format", {"type": "json_object"}),
        ("/v1/responses", "messages", MESSAGES),
        ("/v1/responses", "max_tokens", 3),
        ("/v1/messages", "response_format", {"type": "json_object"}),
        ("/v1/messages", "stop", ["a"]),
    ],
)
def test_a_field_of_another_route_is_named_or_refused(server, path, name, value):
    """Its answer is another one without the field: a client must be able to see that."""
    body = {**BODIES[path], name: value}
    assert asyncio.run(server.post(path, body)).headers["x-ignored-fields"] == name
    with running_server(ServerConfig([NAME], strict_fields=True)) as strict:
        answer = asyncio.run(strict.post(path, body))
        assert answer.status_code == 400 and answer.json()["error"]["param"] == name


@pytest.mark.parametrize(
    ("path", "name", "fields"),
    [
        ("/v1/messages", "stop_sequences", {"stop_sequences": [""]}),
        ("/v1/messages", "output_config", {"output_config": {"format": {}}}),
        ("/v1/messages", "n", {"n": 2}),
        ("/v1/responses", "max_output_tokens", {"max_output_tokens": 0}),
        ("/v1/responses", "input", {"input": [{"role": 5}]}),
        ("/v1/responses", "text", {"text": {"format": {"type": "x"}}}),
    ],
)
def test_an_error_begins_with_the_field_that_the_client_has_sent(server, path, name, fields):
    error = asyncio.run(server.post(path, {**BODIES[path], **fields})).json()["error"]
    assert error["param"] == name and error["message"].startswith(name), error

"""Bad input: an error as OpenAI's clients know it, and nothing of the server changes."""

import asyncio
import contextlib
import itertools
import json
import socket

import httpx
import pytest
from prometheus_client.exposition import generate_latest
from support.http_server import listening_server
from support.server_app import NAME, running_server

from kvpage.server import ServerConfig
from kvpage.server.protocol.chat_request import ChatRequest
from kvpage.server.protocol.completion_request import CompletionRequest
from kvpage.server.protocol.request_model import HARMLESS

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
GOOD = {
    COMPLETIONS: {"model": NAME, "prompt": "the fox", "max_tokens": 2},
    CHATS: {"model": NAME, "messages": [{"role": "user", "content": "the fox"}], "max_tokens": 2},
}
VALUES = {str: "x", int: 3, float: 0.5, bool: True, list: [{}], dict: {"x": [1]}}
TYPES = {
    "model": str, "stream": bool, "stream_options": (dict,), "n": int, "seed": int, "temperature": (int, float),
    "top_p": (int, float), "top_k": int, "min_p": (int, float), "presence_penalty": (int, float),
    "frequency_penalty": (int, float), "repetition_penalty": (int, float), "logit_bias": (), "max_tokens": int,
    "min_tokens": int, "ignore_eos": bool, "stop": str, "stop_token_ids": (), "include_stop_str_in_output": bool,
    "skip_special_tokens": bool, "truncate_prompt_tokens": int, "return_token_ids": bool,
    "return_tokens_as_token_ids": bool, "response_format": (), "structured_outputs": (), "guided_json": (dict,),
    "guided_regex": str, "guided_choice": (), "guided_grammar": (), "cache_salt": str, "kv_hints": (),
    "priority": int, "timeout": (int, float), "request_id": str, "prompt": str, "echo": bool, "best_of": (),
    "add_special_tokens": bool, "messages": (), "max_completion_tokens": int, "top_logprobs": (), "tools": (),
    "tool_choice": (), "modalities": (), "chat_template_kwargs": (dict,), "add_generation_prompt": bool,
    "continue_final_message": bool, "cache_at": (), "reasoning_effort": str, "enable_thinking": bool,
    "thinking": (bool, dict), "reasoning": (dict,), "parallel_tool_calls": bool, "separate_reasoning": bool,
    "include_reasoning": bool, "session_id": str, "session_branch": str,
}  # fmt: skip
"""The types, of those of VALUES, that a field may have; where it is only some values of a type: none."""
OUT_OF_RANGE = {
    "model": ["gpt-4", "", "x" * 100_000],
    "n": [0, -1, 129, 2**31, 10**30], "seed": [2**63, -(2**63) - 1], "temperature": [-0.1, 1e308 * 10, 10**400],
    "top_p": [0, -1, 1.5], "top_k": [-2, 2**31], "min_p": [-0.1, 1.1], "presence_penalty": [2.1, -2.1],
    "frequency_penalty": [2.1, -2.1], "repetition_penalty": [0, -1, 1e-320, 101],
    "logit_bias": [{"x": 1}, {"-1": 1}, {"1": 101}, {"999999": 1}, {"1": "a"}, {str(i): 0 for i in range(1025)}],
    "max_tokens": [0, -2, 2**63], "min_tokens": [-1, 100], "stop": ["", ["a", ""], ["a"] * 17, "a" * 1025],
    "stop_token_ids": [[-1], [2**31], ["a"], [[1]], [1.5], list(range(1025))], "truncate_prompt_tokens": [0, -1],
    "response_format": [{"type": "xml"}, {"type": "json_schema"}, {},
                        {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}],
    "guided_regex": ["(", ""], "guided_choice": [[], [""], [1]], "guided_grammar": ["no grammar at all"],
    "guided_json": ["{", "[1]", {"type": "nothing"}], "structured_outputs": [{}, {"regex": "a", "choice": ["b"]}],
    "cache_salt": ["", "x" * 1025], "priority": [2**31], "timeout": [0, -1],
    "request_id": ["", "x" * 257], "session_id": ["", "x" * 257], "session_branch": ["", "x" * 257],
    "stream_options": [{"include_usage": "yes"}],
    "kv_hints": [{"protocol_version": "9.9", "message_id": "a", "actions": []}, {"actions": []},
                 {"protocol_version": "0.1", "message_id": "a", "actions": [
                     {"action_id": "1", "action_type": "kv.pin", "action_version": "1.0", "payload": {}}]}],
    "cache_at": [[0], [-1], [10**6], [1, 1], [1.5], [True], ["1"], list(range(1, 66))],
}  # fmt: skip
OF_COMPLETIONS = {
    "prompt": [[], "", [[]], [1.5], ["a", 1], [[1], "a"], [-1], [10**6], [2**70], "fox " * 2000, [5] * 2000,
               "\0" * 10**6, ["a"] * 257],
    "logprobs": [-1, 21, True], "best_of": [2], "echo": ["yes"],
}  # fmt: skip
OF_CHATS = {
    "messages": [[], [{}], [{"content": "a"}], [{"role": "user", "content": 3}], [{"role": "", "content": "a"}],
                 [{"role": "nobody", "content": "a"}], [{"role": "user", "content": "fox " * 2000}],
                 [{"role": "user", "content": [{"type": "text", "text": 1}]}]],
    "logprobs": [1, "yes"], "top_logprobs": [5, 21],
    "tools": [[{}], [{"type": "function", "function": {"name": ""}}]],
    "max_completion_tokens": [0, -2, 2**63],
}  # fmt: skip
NOT_JSON = [b"", b"{", b"[]", b"null", b'"text"', b"\xff\xfe", b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}', b"{}}",
            b"{'prompt': 1}", b"[" * 100_000, b'{"prompt": ' * 5_000, b'{"prompt": "a", "temperature": NaN}',
            b'{"prompt": "a", "temperature": Infinity}', b'{"prompt": "a", "top_p": -Infinity}']  # fmt: skip


def state(server) -> tuple:
    """All that a request may change: blocks, counters, metrics, open requests."""
    service = server.app.state.service
    lines = generate_latest(server.app.state.registry).splitlines()
    manager, metrics = server.engine.manager, [line for line in lines if b"kvpage_http_" not in line]
    server.live.call(lambda engine: engine.manager.check()).result()
    return metrics, manager.num_free_blocks, server.live.stats().num_submitted, service.open_requests.num_open


def check_refused(answer, status: int = 400, param: str | None = None) -> dict:
    assert answer.status_code == status, answer.text[:300]
    error = answer.json()["error"]
    assert set(answer.json()) == {"error"} and set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and 0 < len(error["message"]) < 1000
    assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    if param is not None:
        assert error["param"] == param, error
    return error


async def refused_each(server, path: str, cases: list[tuple[str, object]]) -> None:
    """Ask with each wrong value of a field: it is refused by the field's name, and changes nothing."""
    before, wrong = state(server), []
    async with server.client() as client:
        for stream, (name, value) in itertools.product((False, True), cases):
            content = json.dumps({**GOOD[path], "stream": stream, name: value})
            answer = await client.post(path, content=content, headers={"content-type": "application/json"})
            try:
                error = check_refused(answer, 404 if name == "model" and isinstance(value, str) else 400)
                assert error["param"] == name or error["code"] in ("context_length_exceeded", "invalid_json"), error
            except (AssertionError, ValueError) as error:
                wrong.append(f"{name}={str(value)[:80]}: {error!s:.200}")
    assert not wrong, "\n".join(wrong)
    assert state(server) == before


def test_the_matrix_has_every_field():
    fields = {
        field.alias or name for model in (CompletionRequest, ChatRequest) for name, field in model.model_fields.items()
    }
    assert fields - {"logprobs"} == set(TYPES)


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_fields_of_other_types(server, path):
    model = ChatRequest if path == CHATS else CompletionRequest
    cases = []
    for name in model.model_fields:
        good = TYPES.get(name, {COMPLETIONS: int, CHATS: bool}[path])
        good = good if isinstance(good, tuple) else (good,)
        cases += [(name, value) for kind, value in VALUES.items() if kind not in good]
    asyncio.run(refused_each(server, path, [case for case in cases if case[0] != "stream"]))
    for value in ("x", 3, 0.5, [], {}):
        check_refused(asyncio.run(server.post(path, {**GOOD[path], "stream": value})), param="stream")


@pytest.mark.parametrize(("path", "own"), [(COMPLETIONS, OF_COMPLETIONS), (CHATS, OF_CHATS)])
def test_values_out_of_range(server, path, own):
    pytest.importorskip("llguidance")
    cases = [(name, value) for name, values in {**OUT_OF_RANGE, **own}.items() for value in values]
    if path == CHATS:
        cases = [case for case in cases if case != ("max_tokens", 0)] + [("max_tokens", 0)]
    asyncio.run(refused_each(server, path, cases))


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS, "/tokenize", "/detokenize"])
def test_bodies_that_are_no_json_objects(server, path):
    async def ask() -> None:
        async with server.client() as client:
            for body in NOT_JSON:
                answer = await client.post(path, content=body, headers={"content-type": "application/json"})
                assert check_refused(answer)["code"] == "invalid_json", body[:40]

    before = state(server)
    asyncio.run(ask())
    assert state(server) == before


def test_required_fields_are_named(server):
    for path, name in (
        (COMPLETIONS, "prompt"),
        (CHATS, "messages"),
        ("/tokenize", "prompt"),
        ("/detokenize", "tokens"),
    ):
        error = check_refused(asyncio.run(server.post(path, {})), param=name)
        assert error == {**error, "message": f"{name} is required", "code": "missing_required_parameter"}


def test_bookkeeping_is_left_aside_without_a_word(server):
    more = dict.fromkeys(HARMLESS, "x") | {"best_of": None, "suffix": None}
    answer = asyncio.run(server.post(COMPLETIONS, {**GOOD[COMPLETIONS], **more}))
    assert answer.status_code == 200 and "x-ignored-fields" not in answer.headers


def test_strict_fields_are_refused_by_name():
    wrong = [("temprature", 0), ("stream_options", {"other": 1}), ("response_format", {"type": "text", "other": 1})]
    with running_server(ServerConfig([NAME], strict_fields=True)) as server:
        for name, value in wrong:
            body = {**GOOD[CHATS], **dict.fromkeys(HARMLESS, "x"), name: value}
            error = check_refused(asyncio.run(server.post(CHATS, body)), param=name)
            assert error["message"].endswith(" is a field that is not served") and error["code"] == "unknown_field"


# The bodies that vllm-router 0.1.17 makes of a completion and of a chat, recorded.
ROUTED = {
    COMPLETIONS: {"no_stop_trim": False, "return_hidden_states": False, "skip_special_tokens": True, "echo": False},
    CHATS: {"no_stop_trim": False, "return_hidden_states": False, "separate_reasoning": True, "stream_reasoning": True,
            "include_reasoning": True, "continue_final_message": False, "logprobs": False, "ignore_eos": False},
}  # fmt: skip


@pytest.mark.parametrize("path", ROUTED)
def test_what_a_router_adds_to_a_request_is_no_error(server, path):
    assert asyncio.run(server.post(path, {**GOOD[path], **ROUTED[path]})).status_code == 200
    answer = asyncio.run(server.post(path, {**GOOD[path], "return_hidden_states": True}))
    assert answer.status_code == 200 and answer.headers["x-ignored-fields"] == "return_hidden_states"


def test_a_model_that_is_not_here(server):
    error = check_refused(asyncio.run(server.post(CHATS, {**GOOD[CHATS], "model": "gpt-4"})), 404, "model")
    assert (
        error["code"] == "model_not_found"
        and error["message"] == f"the model 'gpt-4' does not exist here, {NAME!r} does"
    )
    check_refused(asyncio.run(server.get("/v1/models/gpt-4")), 404, "model")


def test_other_content_types_methods_and_paths(server):
    async def ask() -> None:
        async with server.client() as client:
            for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
                answer = await client.post(COMPLETIONS, content=b"{}", headers={"content-type": kind})
                assert check_refused(answer, 415)["code"] == "unsupported_media_type"
            for path in (COMPLETIONS, CHATS, "/tokenize", "/detokenize"):
                for method in ("GET", "PUT", "DELETE", "PATCH"):
                    answer = await client.request(method, path)
                    check_refused(answer, 405)
                    assert answer.headers["allow"] == "POST"
            for path in ("/v1", "/v1/nothing", "/v2/completions", "/../etc/passwd", "/" + "x" * 5000):
                check_refused(await client.post(path, json={}), 404)
            assert check_refused(await client.post("/v1/embeddings", json={}), 404)["code"] == "not_served"

    before = state(server)
    asyncio.run(ask())
    assert state(server) == before


@pytest.mark.parametrize("says_length", [False, True])
def test_a_body_of_a_gibibyte_is_refused_at_its_beginning(server, says_length):
    num_sent = 0

    async def body():
        nonlocal num_sent
        for _ in range(1024):
            num_sent += 1
            yield b" " * 2**20

    async def ask():
        headers = {"content-type": "application/json"} | ({"content-length": str(2**30)} if says_length else {})
        async with server.client() as client:
            return await client.post(COMPLETIONS, content=body(), headers=headers)

    before = state(server)
    answer = asyncio.run(ask())
    error = check_refused(answer, 413)
    assert error["code"] == "body_too_large" and answer.headers["connection"] == "close"
    assert num_sent == (0 if says_length else ServerConfig().max_body_bytes // 2**20 + 1)
    assert state(server) == before


def test_a_gibibyte_over_a_socket_is_refused_and_not_kept():
    """The client is answered, or cut off, long before it has sent all."""
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    piece, num_sent, answer = b"100000\r\n" + b" " * 2**20 + b"\r\n", 0, b""
    with listening_server(ServerConfig([NAME], max_body_bytes=2**20)) as (address, server):
        before = state(server)
        port = int(address.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=300) as connection:
            connection.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
            with contextlib.suppress(ConnectionError):
                for num_sent in range(1024):  # noqa: B007
                    connection.sendall(piece)
            with contextlib.suppress(ConnectionError):
                answer = connection.recv(2**16)
        assert num_sent < 512
        assert not answer or answer.startswith(b"HTTP/1.1 413 ")
        assert state(server) == before
        assert httpx.post(f"{address}/v1/completions", json=GOOD[COMPLETIONS], timeout=300).status_code == 200

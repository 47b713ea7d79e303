"""Work before a request is queued is bounded: wrong bodies, bodies at once, long texts, large batches and answers."""

import asyncio
import json
import threading
from collections import Counter
from typing import Any

import pytest
from pydantic import ValidationError
from server.test_bad_input import CHATS, COMPLETIONS, GOOD, check_refused, state
from support.insides import stepper_of
from support.server_app import NAME, Server, events_of, running_server
from support.waiting import until

from kvpage.server import ServerConfig
from kvpage.server.answers import formats, responses
from kvpage.server.protocol.chat_request import ChatRequest
from kvpage.server.protocol.completion_request import CompletionRequest
from kvpage.server.protocol.errors import ApiError
from kvpage.server.protocol.kv_hints import KvHints
from kvpage.server.protocol.request_model import MAX_VALUES, parse_json, read_model
from kvpage.server.routes import bodies, generation
from kvpage.server.routes.tokens import DetokenizeRequest
from kvpage.serving import AsyncEngineConfig
from kvpage.serving.text import detokenizer, guide_compiler

MANY, MIB = 5000, 2**20
JSON = {"content-type": "application/json"}
FIELDS = {f"field{index}": 1 for index in range(MANY)}


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "a", **fields}]}


@pytest.mark.parametrize(
    ("kind", "body", "param"),
    [
        (ChatRequest, chat(content=[1] * MANY), "messages"),
        (ChatRequest, chat(content=[{"type": 1, "text": 1, "refusal": 1}] * MANY), "messages"),
        (ChatRequest, chat(tool_calls=[1] * MANY), "messages"),
        (ChatRequest, {"messages": [1] * MANY}, "messages"),
        (ChatRequest, chat(content=[[1] * MANY]), "messages"),
        (ChatRequest, chat() | {"tools": [FIELDS]}, "tools"),
        (ChatRequest, chat() | {"modalities": ["image"] * MANY}, "modalities"),
        (ChatRequest, chat() | FIELDS, None),
        (CompletionRequest, {"prompt": "a", "response_format": FIELDS}, "response_format"),
        (CompletionRequest, {"prompt": "a", "logit_bias": dict.fromkeys(FIELDS, "x")}, "logit_bias"),
        (CompletionRequest, {"prompt": "a", "stop": ["a"] * MANY + [1]}, "stop"),
        (CompletionRequest, {"prompt": "a", "stop_token_ids": ["a"] * 1000}, "stop_token_ids"),
        (CompletionRequest, {"prompt": "a", "guided_choice": [1] * 4000}, "guided_choice"),
        (DetokenizeRequest, {"tokens": ["x"] * MANY}, "tokens"),
        (DetokenizeRequest, {"tokens": [-1] * MANY}, "tokens"),
        (KvHints, {"protocol_version": "0.1", "message_id": "", "actions": [1] * 16}, "actions"),
    ],
)
def test_wrong_elements_make_a_few_errors(kind, body, param):
    with pytest.raises(ValidationError) as found:
        kind.model_validate(body)
    assert found.value.error_count() <= 4
    answer = pytest.raises(ApiError, read_model, kind, body).value
    assert (answer.status, answer.param) == (400, param) and len(answer.message) < 300


def test_values_in_errors_are_short():
    for value in ("x" * MANY, [["x" * MANY]], {"x": [1] * MANY}, {"x" * MANY: 1}, 10**4000):
        answer = pytest.raises(ApiError, read_model, CompletionRequest, {"prompt": "a", "seed": value}).value
        assert answer.message.startswith("seed must be ") and len(answer.message) < 200
    answer = pytest.raises(ApiError, read_model, CompletionRequest, {"prompt": "a", "x" * MANY: 1}).value
    assert (answer.code, answer.param) == ("unknown_field", "x" * 80)


def test_bodies_hold_so_many_values():
    for body in (b"[1" + b",1" * MAX_VALUES + b"]", b"[" + b"[]," * (MAX_VALUES // 2 + 1) + b"1]", b"{" * MAX_VALUES):
        with pytest.raises(ApiError, match=f"body must hold at most {MAX_VALUES} values, got more"):
            parse_json(body + b"{")


def test_long_bodies_of_wrong_elements_are_400(server):
    num = 2**19
    cases = [
        (CHATS, b'{"messages": [{"role": "user", "content": [1' + b",1" * (8 * MIB - 100) + b"]}]}", None),
        (CHATS, b'{"messages": [{"role": "user", "content": [1' + b",1" * num + b"]}]}", "messages"),
        ("/detokenize", b'{"tokens": [-1' + b",-1" * (2**20 - 2) + b"]}", "tokens"),
        ("/tokenize", b'{"messages": [1' + b",1" * num + b"]}", "messages"),
    ]

    async def ask() -> None:
        async with server.client() as client:
            for path, body, param in cases:
                error = check_refused(await client.post(path, content=body, headers=JSON), param=param)
                assert param is not None or error["code"] == "too_many_values"

    before = state(server)
    asyncio.run(ask())
    assert state(server) == before


def test_the_loop_goes_on_while_a_long_body_is_read(server, monkeypatch):
    is_answered = threading.Event()

    def slow(body: bytes) -> Any:
        assert is_answered.wait(120), "the event loop waits for a body"
        return parse_json(body)

    async def ask() -> list[int]:
        async with server.client() as client:
            reading = asyncio.ensure_future(client.post(COMPLETIONS, json={**GOOD[COMPLETIONS], "user": "x" * 2**17}))
            await asyncio.sleep(0)
            other = await client.get("/v1/models")
            is_answered.set()
            return [other.status_code, (await reading).status_code]

    monkeypatch.setattr(bodies, "parse_json", slow)
    assert asyncio.run(ask()) == [200, 200]


async def held_posts(server: Server, num: int, size: int, path: str = COMPLETIONS) -> tuple[Counter[int], int]:
    """Post bodies at once of which each comes to its last byte once all have; return the statuses, and the bytes then.

    size: of each body.
    """
    is_here, requests, answered = asyncio.Event(), server.app.state.service.open_requests, 0
    data = json.dumps({**GOOD[COMPLETIONS], "max_tokens": 1}).encode().ljust(size)
    num_begun = 0

    async def body():
        nonlocal num_begun
        yield data[:-1]
        num_begun += 1
        await is_here.wait()
        yield data[-1:]

    async def post(client) -> int:
        nonlocal answered
        answer = await client.post(path, content=body(), headers=JSON)
        answered += 1
        assert answer.status_code == 200 or int(answer.headers["retry-after"]) >= 1
        return answer.status_code

    async with server.client() as client:
        posts = [asyncio.ensure_future(post(client)) for _ in range(num)]
        while num_begun + answered < num or requests.num_open + answered < num:
            await asyncio.sleep(0.001)
        num_bytes = requests.num_bytes
        is_here.set()
        return Counter(await asyncio.gather(*posts)), num_bytes


def test_bodies_at_once_have_so_many_bytes():
    size = 2**17
    config = ServerConfig([NAME], max_body_bytes=size, max_open_bytes=4 * size)
    with running_server(config) as server:
        found, num_bytes = asyncio.run(held_posts(server, 50, size))
        assert found == {200: 4, 503: 46} and 3 * size < num_bytes <= 4 * size
        requests = server.app.state.service.open_requests
        assert (requests.num_open, requests.num_bytes) == (0, 0)
        assert asyncio.run(server.post(COMPLETIONS, GOOD[COMPLETIONS])).status_code == 200


@pytest.mark.parametrize("path", [COMPLETIONS, COMPLETIONS + "/render"])
def test_a_request_has_its_place_before_its_body(path):
    with running_server(ServerConfig([NAME], max_open_requests=2)) as server:
        found, num_bytes = asyncio.run(held_posts(server, 6, 200, path))
        assert found == {200: 2, 503: 4} and num_bytes < 400
        assert server.app.state.service.open_requests.num_open == 0


def test_a_body_that_does_not_come_is_408():
    async def body():
        yield b"{"
        await asyncio.sleep(60)

    async def ask(server) -> None:
        async with server.client() as client:
            answer = await client.post(COMPLETIONS, content=body(), headers=JSON)
        assert check_refused(answer, 408)["code"] == "body_too_slow" and answer.headers["connection"] == "close"

    with running_server(ServerConfig([NAME], max_body_seconds=0.01)) as server:
        before = state(server)
        asyncio.run(ask(server))
        assert state(server) == before


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_has_its_place_to_its_end(server, stream):
    requests, during = server.app.state.service.open_requests, []

    async def ask() -> None:
        body = json.dumps({**GOOD[COMPLETIONS], "stream": stream}).encode()
        messages = [{"type": "http.request", "body": body}]

        async def receive():
            return messages.pop() if messages else await asyncio.Event().wait()

        async def send(message) -> None:
            during.append((requests.num_open, requests.num_bytes == len(body)))

        scope = {"type": "http", "method": "POST", "path": COMPLETIONS, "query_string": b"", "headers": [
            (b"content-type", b"application/json")]}  # fmt: skip
        await server.app(scope, receive, send)

    asyncio.run(ask())
    assert len(during) >= 3 and set(during) == {(1, True)}
    until(lambda: (requests.num_open, requests.num_bytes) == (0, 0))


def test_prompts_have_so_many_tokens_in_all():
    config = ServerConfig([NAME], max_batch_tokens=12, max_scored_tokens=24)
    long = "prompt must have at most 12 tokens in all"
    cases = [
        ({"prompt": [[1] * 6] * 2}, None),
        ({"prompt": [1] * 13}, None),
        ({"prompt": [[1] * 6, [1] * 7]}, f"{long}, got 13"),
        ({"prompt": ["abc", "xyz" * 9]}, long),
        ({"prompt": [1] * 6, "n": 2, "echo": True}, None),
        ({"prompt": [1] * 13, "n": 2}, None),
        ({"prompt": [1] * 7, "n": 2, "echo": True}, f"{long} in each of n=2 samples, got 14"),
        ({"prompt": [1] * 7, "n": 2, "return_token_ids": True}, f"{long} in each of n=2 samples, got 14"),
        ({"prompt": [1] * 6, "n": 2, "echo": True, "logprobs": 1}, None),
        ({"prompt": [1] * 7, "n": 1, "echo": True, "logprobs": 3}, "logprobs must be at most 24 in all"),
    ]

    async def ask(server) -> None:
        for body, refusal in cases:
            answer = await server.post(COMPLETIONS, {"max_tokens": 1, **body})
            assert answer.status_code == (200 if refusal is None else 400), (body, answer.text)
            if refusal is not None:
                error = check_refused(answer, param=refusal.partition(" ")[0])
                assert error["message"].startswith(refusal) and error["code"] == "too_many_tokens"

    with running_server(config) as server:
        asyncio.run(ask(server))


def test_a_text_of_which_the_end_is_taken_is_not_too_long():
    config = ServerConfig([NAME], max_prompt_tokens=2, max_cut_characters=1000)
    with running_server(config) as server:
        cut = {"max_tokens": 1, "truncate_prompt_tokens": 2}
        asked = [server.post(COMPLETIONS, {**cut, "prompt": "ab" * number}) for number in (500, 501)]
        chats = server.post(CHATS, {**cut, **chat(content="ab" * 501)})

        async def ask() -> list[Any]:
            return [await each for each in (*asked, chats)]

        good, *wrong = asyncio.run(ask())
        assert good.status_code == 200 and good.json()["usage"]["prompt_tokens"] == 2
        for answer in wrong:
            message = check_refused(answer, param="prompt")["message"]
            assert message.startswith("prompt must have at most 1000 characters with truncate_prompt_tokens, got 10")


def test_a_batch_that_no_queue_takes_is_400():
    with running_server(limits=AsyncEngineConfig(max_num_waiting=3)) as server:
        message = "prompt must be a batch of at most max_num_waiting = 3, got 4"
        for stream in (False, True):
            body = {"prompt": ["a"] * 4, "max_tokens": 1, "stream": stream}
            assert check_refused(asyncio.run(server.post(COMPLETIONS, body)), param="prompt")["message"] == message
        assert asyncio.run(server.post(COMPLETIONS, {"prompt": ["a"] * 3, "max_tokens": 1})).status_code == 200


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_a_full_queue_costs_no_more_than_the_body(server, monkeypatch, path):
    monkeypatch.setattr(stepper_of(server.live).admission, "_max_num_waiting", 0)
    monkeypatch.setattr(server.app.state.service, "text", None)
    answer = asyncio.run(server.post(path, GOOD[path]))
    assert check_refused(answer, 503)["code"] == "server_busy" and int(answer.headers["retry-after"]) >= 1


def test_special_tokens_are_found_once_for_all_samples(server, monkeypatch):
    num_calls, found = 0, detokenizer.special_ids

    def counted(tokenizer: Any) -> frozenset[int]:
        nonlocal num_calls
        num_calls += 1
        return found(tokenizer)

    monkeypatch.setattr(detokenizer, "special_ids", counted)
    for stream in (False, True):
        body = {"prompt": ["a", "b"], "n": 4, "max_tokens": 2, "stop": "no such text", "stream": stream}
        assert asyncio.run(server.post(COMPLETIONS, body)).status_code == 200
    assert num_calls <= 3, "one for each answer, and one of the engine's"


def test_forms_are_compiled_once_and_aside(server, monkeypatch):
    """The engine forgets each at once, and yet no sample has its form compiled on another thread."""
    pytest.importorskip("llguidance")
    threads, compiled = [], guide_compiler.GuideCompiler._compiled

    def noted(self: Any, guide: Any) -> Any:
        threads.append(threading.current_thread().name.partition("_")[0])
        return compiled(self, guide)

    monkeypatch.setattr(guide_compiler, "MAX_KEPT", 0)
    monkeypatch.setattr(guide_compiler.GuideCompiler, "_compiled", noted)
    for stream in (False, True):
        form = {"guided_regex": f"a[xyz]{{{3 + stream}}}"}
        body = {"prompt": ["a", "b"], "n": 3, "max_tokens": 4, "stream": stream, **form}
        assert asyncio.run(server.post(COMPLETIONS, body)).status_code == 200
    assert threads == ["kvpage-compiler"] * 2


def test_long_answers_are_written_aside(server, monkeypatch):
    threads, written = set(), generation.Generation._answer

    def noted(self: Any, *arguments: Any) -> bytes:
        threads.add(threading.current_thread() is threading.main_thread())
        return written(self, *arguments)

    body = {
        "prompt": "the fox",
        "n": 2,
        "max_tokens": 4,
        "seed": 7,
        "echo": True,
        "logprobs": 2,
        "return_token_ids": True,
    }
    monkeypatch.setattr(generation.Generation, "_answer", noted)
    plain = asyncio.run(server.post(COMPLETIONS, body)).json()["choices"]
    assert threads == {True}
    monkeypatch.setattr(generation, "FEW_TOKENS", 0)
    monkeypatch.setattr(formats, "PART", 2)
    monkeypatch.setattr(responses, "PART_BYTES", 100)
    assert asyncio.run(server.post(COMPLETIONS, body)).json()["choices"] == plain
    assert threads == {True, False}


def test_long_prompts_of_streams_are_written_aside(server, monkeypatch):
    threads, written = set(), generation.Generation._begin

    def noted(self: Any, *arguments: Any) -> bytes:
        threads.add(threading.current_thread() is threading.main_thread())
        return written(self, *arguments)

    body = {"prompt": "the fox", "max_tokens": 2, "return_token_ids": True, "stream": True, "request_id": "a"}
    monkeypatch.setattr(generation.Generation, "_begin", noted)
    plain = asyncio.run(server.post(COMPLETIONS, body)).text
    assert threads == {True}
    monkeypatch.setattr(generation, "FEW_TOKENS", 0)
    monkeypatch.setattr(responses, "PART_BYTES", 100)
    parted = asyncio.run(server.post(COMPLETIONS, body)).text
    assert threads == {True, False}
    ids = [[event["choices"][0].get("prompt_token_ids") for event in events_of(text)][0] for text in (plain, parted)]
    assert ids == [server.tokens("the fox")] * 2


def test_long_answers_of_other_paths_are_json(monkeypatch):
    monkeypatch.setattr(formats, "PART", 2)
    each = {"model": "a", "prompt": None, "token_ids": [1, 2, 3], "text": "\u00e4", "none": []}
    for content in (each, [each, each], []):
        assert json.loads(bodies.long_answer(content).body) == content


def test_lists_in_parts_are_json():
    for number in (0, 1, formats.PART - 1, formats.PART, formats.PART + 1):
        values = [[index, None, "\u00e4"] for index in range(number)]
        assert json.loads(formats.long_list(iter(values))) == values
    assert formats.long_list([1, {"a": "b"}]) == '[1,{"a":"b"}]'


def test_arguments_of_calls_that_are_nested_deeply_are_400(server):
    call = {"function": {"name": "f", "arguments": "[" * 100_000}}
    check_refused(asyncio.run(server.post(CHATS, {**chat(tool_calls=[call]), "max_tokens": 1})), param="messages")

# ruff: noqa: E501 - a body is read as one
"""/v1/messages: the shapes of Anthropic's schema, calls, results, thoughts, errors and keys."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pydantic
import pytest
from server.test_bad_input import state
from server.test_tool_calls import CITY, SPOKEN
from support.agent_server import AgentServer, agent_server, forced
from support.http_server import serving
from support.server_app import NAME, running_server

from kvpage.server import ApiKey, ServerConfig
from kvpage.server.answers.messages_format import input_of

anthropic = pytest.importorskip("anthropic")
pytest.importorskip("llguidance")

PATH = "/v1/messages"
HELLO = [{"role": "user", "content": "the weather?"}]
WEATHER = {"name": "get_weather", "description": "Tell it", "input_schema": CITY}
CALL, THOUGHT = SPOKEN["hermes"], "<think>\nBonn, so\n</think>\n\n"
BONN = {"city": "Bonn", "days": 2}
OFF = {"thinking": {"type": "disabled"}}


@pytest.fixture(scope="module")
def server() -> Iterator[AgentServer]:
    with agent_server("hermes", thinks=True) as made:
        yield made


def posted(server, path: str = PATH, **fields: Any):
    body = {"model": NAME, "messages": HELLO, "temperature": 0, "max_tokens": 300, **fields}
    return asyncio.run(server.post(path, body))


def message(server, **fields: Any) -> Any:
    """Return a message, which is one by Anthropic's schema."""
    answer = posted(server, **fields)
    assert answer.status_code == 200, answer.text
    return anthropic.types.Message.model_validate_json(answer.text)


def events(server, **fields: Any) -> list[Any]:
    """Return the events of a stream, each one by Anthropic's schema."""
    kinds, made = pydantic.TypeAdapter(anthropic.types.RawMessageStreamEvent), []
    for event in posted(server, stream=True, **fields).text.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        made.append(kinds.validate_json(data.removeprefix("data: ")))
        assert name == f"event: {made[-1].type}"
    return made


def shown(content: list[Any]) -> list[tuple]:
    values = {"text": lambda b: (b.text,), "thinking": lambda b: (b.thinking,), "tool_use": lambda b: (b.name, b.input)}
    return [(block.type, *values[block.type](block)) for block in content]


def refused(answer, status: int = 400, kind: str = "invalid_request_error") -> dict:
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert body["type"] == "error" and body["error"]["type"] == kind and body["error"]["message"]
    return body["error"]


def test_thoughts_text_and_calls_are_blocks_whole_and_streamed(server):
    for text, blocks, reason in (
        ("Yes.", [("text", "Yes.")], "end_turn"),
        (THOUGHT + "Yes.", [("thinking", "Bonn, so"), ("text", "Yes.")], "end_turn"),
        (THOUGHT + CALL + CALL, [("thinking", "Bonn, so"), *[("tool_use", "get_weather", BONN)] * 2], "tool_use"),
    ):
        with forced(server, [text, text]):
            whole, parts = message(server, tools=[WEATHER]), events(server, tools=[WEATHER])
        assert shown(whole.content) == blocks and whole.stop_reason == reason and whole.id.startswith("msg_")
        assert [event.type for event in parts[-2:]] == ["message_delta", "message_stop"]
        assert parts[-2].delta.stop_reason == reason and parts[-2].usage.output_tokens == whole.usage.output_tokens
        texts: list[str] = []
        for event in parts:
            if event.type == "content_block_start":
                assert event.index == len(texts)
                texts.append("")
            elif event.type == "content_block_delta":
                delta = event.delta
                texts[event.index] += getattr(delta, {"text_delta": "text", "thinking_delta": "thinking"}.get(delta.type, "partial_json"))  # fmt: skip
        assert texts == [block[1] if block[0] != "tool_use" else json.dumps(block[2]) for block in blocks]


def test_usage_counts_cached_tokens_by_themselves(server):
    long = [{"role": "user", "content": "the weather in Bonn, please, in some more words than before? " * 3}]
    first, second = (message(server, messages=long, max_tokens=1) for _ in range(2))
    assert second.usage.cache_read_input_tokens > 8
    counted = posted(server, PATH + "/count_tokens", messages=long, max_tokens=None).json()["input_tokens"]
    for usage in (first.usage, second.usage):
        assert usage.input_tokens + usage.cache_read_input_tokens == counted
    assert first.stop_reason == "max_tokens"


def test_a_call_that_must_be_is_guided(server):
    for choice in (
        {"type": "any"},
        {"type": "tool", "name": "get_weather"},
        {"type": "any", "disable_parallel_tool_use": True},
    ):
        found = message(server, tools=[WEATHER], tool_choice=choice, **OFF)
        assert found.stop_reason == "tool_use" and all(block.input["days"] in (1, 2) for block in found.content)
        assert choice == {"type": "any"} or len(found.content) == 1


def test_results_and_thoughts_of_earlier_turns_reach_the_prompt(server):
    use = {"type": "tool_use", "id": "call_1", "name": "get_weather", "input": BONN}
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "x", "signature": ""}, {"type": "redacted_thinking", "data": "y"}, use]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "it rains"}]},
                                     {"type": "text", "text": "so?"}]},
    ]  # fmt: skip
    system = [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}]
    chat = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": json.dumps(BONN)}}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "it rains"},
        {"role": "user", "content": "so?"},
    ]  # fmt: skip
    rendered = asyncio.run(server.post("/v1/chat/completions/render", {"messages": chat})).json()["token_ids"]
    counted = posted(server, PATH + "/count_tokens", messages=turns, system=system, max_tokens=None).json()
    assert counted == {"input_tokens": len(rendered)}


def test_the_models_last_message_is_continued(server):
    turns = [*HELLO, {"role": "assistant", "content": "It is"}]
    with_end = posted(server, PATH + "/count_tokens", messages=[*turns, *HELLO]).json()["input_tokens"]
    assert posted(server, PATH + "/count_tokens", messages=turns).json()["input_tokens"] < with_end
    with forced(server, [" sunny."]):
        assert shown(message(server, messages=turns).content) == [("text", " sunny.")]


def test_stop_sequences_and_forms(server):
    with forced(server, ["a b c d"]):
        found = message(server, stop_sequences=["c"])
    assert (found.stop_reason, found.stop_sequence, found.content[0].text) == ("stop_sequence", "c", "a b ")
    schema = {
        "type": "object",
        "properties": {"ok": {"enum": [True]}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    found = message(server, output_config={"format": {"type": "json_schema", "schema": schema}, "effort": "low"})
    assert json.loads(found.content[0].text) == {"ok": True}


def test_what_would_be_another_answer_is_refused_in_anthropics_shape(server):
    before = state(server)
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    for fields, param in (
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [image]}]}, "messages"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "messages"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools"),
        ({"tool_choice": {"type": "x"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
        ({"temperature": -1}, "temperature"),
        ({"stop_sequences": [""]}, "stop"),
    ):
        assert refused(posted(server, **fields))["param"].startswith(param), fields
    refused(posted(server, model="none"), 404, "not_found_error")
    assert state(server) == before
    fields = {"metadata": {"user_id": "x"}, "service_tier": "auto", "thinking": {"type": "enabled", "budget_tokens": 1024},
              "cache_control": {"type": "ephemeral"}, "top_k": 5, "max_tokens": 1, "container": None}  # fmt: skip
    answer = posted(server, **fields)
    assert answer.status_code == 200 and "x-ignored-fields" not in answer.headers


def test_keys_come_in_anthropics_header():
    with running_server(ServerConfig([NAME], [ApiKey("k" * 20, "ann")])) as server:
        body = {"model": NAME, "max_tokens": 1, "messages": HELLO}
        assert asyncio.run(server.post(PATH, body, **{"x-api-key": "k" * 20})).status_code == 200
        refused(asyncio.run(server.post(PATH, body, **{"x-api-key": "wrong"})), 401, "authentication_error")
        refused(asyncio.run(server.post(PATH, body)), 401, "authentication_error")


def test_an_error_within_a_stream_is_an_event(server, monkeypatch):
    monkeypatch.setattr("kvpage.server.answers.transcript.Transcript.take", lambda *_: 1 / 0)
    last = posted(server, stream=True).text.removesuffix("\n\n").split("\n\n")[-1].split("\n")
    assert last[0] == "event: error" and json.loads(last[1].removeprefix("data: "))["error"]["type"] == "api_error"


def test_anthropics_client_streams_a_call_and_its_result():
    with (
        agent_server("hermes", thinks=True) as server,  # `serving` closes it
        serving(server.app, server.live) as url,
        anthropic.Anthropic(base_url=url, api_key="x", max_retries=0) as client,
    ):
        with forced(server, [THOUGHT + CALL, "It rains."]):
            with client.messages.stream(model=NAME, max_tokens=300, messages=HELLO, tools=[WEATHER]) as stream:
                first = stream.get_final_message()
            use = first.content[-1]
            result = {"type": "tool_result", "tool_use_id": use.id, "content": "rain"}
            turns = [*HELLO, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
            second = client.messages.create(model=NAME, max_tokens=300, messages=turns, tools=[WEATHER])
        assert use.input == BONN and first.stop_reason == "tool_use" and second.content[0].text == "It rains."
        with pytest.raises(anthropic.BadRequestError):
            client.messages.create(model=NAME, max_tokens=1, messages=[])


def test_arguments_that_are_no_object_are_kept():
    assert input_of("") == {} and input_of('{"a": 1}') == {"a": 1}
    assert input_of('{"a": ') == {"arguments": '{"a": '} and input_of("[1]") == {"arguments": "[1]"}
    for text in ('{"a": NaN}', '{"a": 1e999}', '{"a": "\\ud800"}'):
        assert input_of(text) == {"arguments": text}, "a client could not read it"

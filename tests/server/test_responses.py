# ruff: noqa: E501 - a body is read as one
"""/v1/responses: the shapes of OpenAI's schema, turns that follow each other, calls, errors and limits."""

import asyncio
import json
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pydantic
import pytest
from server.test_bad_input import check_refused, state
from server.test_tool_calls import CITY, SPOKEN
from support.agent_server import AgentServer, agent_server, forced
from support.http_server import serving
from support.server_app import NAME, running_server

from kvpage.server import ApiKey, ServerConfig
from kvpage.server.protocol.errors import ApiError
from kvpage.server.protocol.responses_request import messages_of
from kvpage.server.running.kept_responses import KeptResponses

openai = pytest.importorskip("openai")
pytest.importorskip("llguidance")
types = pytest.importorskip("openai.types.responses")

PATH = "/v1/responses"
WEATHER = {"type": "function", "name": "get_weather", "description": "Tell it", "parameters": CITY, "strict": False}
CALL, THOUGHT = SPOKEN["hermes"], "<think>\nBonn, so\n</think>\n\n"


@pytest.fixture(scope="module")
def server() -> Iterator[AgentServer]:
    with agent_server("hermes", thinks=True) as made:
        yield made


def posted(server, **fields: Any):
    body = {"model": NAME, "input": "the weather?", "temperature": 0, "max_output_tokens": 300, **fields}
    return asyncio.run(server.post(PATH, body))


def response(server, **fields: Any) -> Any:
    """Return a response, which is one by OpenAI's schema."""
    answer = posted(server, **fields)
    assert answer.status_code == 200, answer.text
    return types.Response.model_validate_json(answer.text)


def events(server, **fields: Any) -> list[Any]:
    """Return the events of a stream, each one by OpenAI's schema."""
    answer = posted(server, stream=True, **fields)
    kinds, made = pydantic.TypeAdapter(types.ResponseStreamEvent), []
    for number, event in enumerate(answer.text.removesuffix("\n\n").split("\n\n")):
        name, data = event.split("\n")
        made.append(kinds.validate_json(data.removeprefix("data: ")))
        assert name == f"event: {made[-1].type}" and made[-1].sequence_number == number
    return made


def shown(response: Any) -> list[tuple]:
    """Return the output without ids."""
    items = []
    for item in response.output:
        if item.type == "function_call":
            items.append((item.type, item.name, item.arguments, item.status))
        else:
            items.append((item.type, *(part.text for part in item.content)))
    return items


def test_a_text_is_answered(server):
    with forced(server, ["It is sunny."]):
        answer = response(server, instructions="be brief", metadata={"a": "b"})
    assert answer.output_text == "It is sunny." and answer.status == "completed" and answer.metadata == {"a": "b"}
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert answer.id.startswith("resp_") and answer.object == "response" and answer.model == NAME
    cut = response(server, max_output_tokens=2)
    assert cut.status == "incomplete" and cut.incomplete_details.reason == "max_output_tokens"


def test_thoughts_text_and_calls_are_items_whole_and_streamed(server):
    for text, items in (
        (THOUGHT + "Yes.", [("reasoning", "Bonn, so"), ("message", "Yes.")]),
        (THOUGHT + CALL, [("reasoning", "Bonn, so"), ("function_call", "get_weather", json.dumps({"city": "Bonn", "days": 2}), "completed")]),
        ("Hm.\n" + CALL + CALL, [("message", "Hm."), *[("function_call", "get_weather", json.dumps({"city": "Bonn", "days": 2}), "completed")] * 2]),
    ):  # fmt: skip
        with forced(server, [text, text]):
            whole, parts = response(server, tools=[WEATHER]), events(server, tools=[WEATHER])
        assert shown(whole) == items and shown(parts[-1].response) == items
        assert parts[0].type == "response.created" and parts[-1].type == "response.completed"
        assert parts[-1].response.usage.output_tokens == whole.usage.output_tokens
        added = [event.item for event in parts if event.type == "response.output_item.added"]
        done = [event.item for event in parts if event.type == "response.output_item.done"]
        assert [item.id for item in added] == [item.id for item in done]
        for event, item in ((event, item) for event in parts for item in done):
            if event.type.endswith("arguments.done") and event.item_id == item.id:
                deltas = [e.delta for e in parts if e.type.endswith("arguments.delta") and e.item_id == item.id]
                assert event.arguments == item.arguments == "".join(deltas) and len(deltas) > 3


def test_a_call_that_must_be_is_guided(server):
    off = {"chat_template_kwargs": {"enable_thinking": False}, "tools": [WEATHER]}
    for choice in ("required", {"type": "function", "name": "get_weather"}):
        answer = response(server, tool_choice=choice, **off)
        assert answer.output and all(json.loads(item.arguments)["days"] in (1, 2) for item in answer.output)


def test_a_form_of_json_is_followed(server):
    schema = {
        "type": "object",
        "properties": {"ok": {"enum": [True]}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    form = {"format": {"type": "json_schema", "name": "a", "schema": schema, "strict": True}, "verbosity": "low"}
    assert json.loads(response(server, text=form).output_text) == {"ok": True}


def test_turns_follow_each_other(server):
    with forced(server, [THOUGHT + CALL]):
        first = response(server, tools=[WEATHER], instructions="be brief")
    call = first.output[-1]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "it rains"}
    with forced(server, ["It rains.", "It rains.", "So it does."]):
        second = response(server, input=[result], previous_response_id=first.id)
        items = [{"role": "user", "content": "the weather?"}, *(item.model_dump() for item in first.output), result]
        alone = response(server, input=items, store=False)
        third = response(server, input="Really?", previous_response_id=second.id)
    assert second.previous_response_id == first.id and second.usage.input_tokens == alone.usage.input_tokens
    assert second.usage.input_tokens_details.cached_tokens > 0
    assert third.usage.input_tokens > second.usage.input_tokens
    found = asyncio.run(server.get(f"{PATH}/{second.id}"))
    assert types.Response.model_validate_json(found.text).output_text == "It rains."
    assert asyncio.run(server.get(f"{PATH}/{alone.id}")).status_code == 404


def test_responses_that_are_not_kept_are_404(server):
    for answer in (
        posted(server, previous_response_id="resp_none"),
        asyncio.run(server.get(f"{PATH}/resp_none")),
    ):
        assert answer.status_code == 404 and answer.json()["error"]["code"] == "response_not_found"
    with forced(server, ["Yes."]):
        kept = response(server)

    async def deleted() -> list[int]:
        async with server.client() as client:
            return [(await client.delete(f"{PATH}/{kept.id}")).status_code for _ in range(2)]

    assert asyncio.run(deleted()) == [200, 404]


def test_tenants_do_not_see_each_others_responses():
    keys = {name: name * 20 for name in ("a", "b")}
    config = ServerConfig([NAME], [ApiKey(key, name) for name, key in keys.items()])
    with running_server(config) as server:
        body = {"input": "hi", "max_output_tokens": 2}
        first = asyncio.run(server.post(PATH, body, authorization=f"Bearer {keys['a']}")).json()["id"]
        for name, status in (("a", 200), ("b", 404)):
            later = asyncio.run(
                server.post(PATH, {**body, "previous_response_id": first}, authorization=f"Bearer {keys[name]}")
            )
            assert later.status_code == status
        assert asyncio.run(server.post(PATH, body)).status_code == 401


def test_what_would_be_another_answer_is_refused_and_changes_nothing(server):
    before = state(server)
    for fields, param in (
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "function", "name": ""}]}, "tools"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": [{"content": "x"}]}, "input"),
        ({"input": [{"type": "function_call", "call_id": "x"}]}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"text": {"format": {"type": "xml"}}}, "text"),
        ({"n": 2}, "n"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"temperature": -1}, "temperature"),
    ):
        for stream in (False, True):
            check_refused(posted(server, stream=stream, **fields), param=param)
    assert posted(server, model="none").status_code == 404
    assert state(server) == before


def test_fields_of_clients_are_taken(server):
    fields = {
        "include": ["reasoning.encrypted_content"], "store": None, "truncation": "auto", "user": "x", "service_tier": "auto",
        "reasoning": {"effort": "low", "summary": "auto"}, "prompt_cache_key": "k", "text": {"verbosity": "low"},
        "tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "top_p": 1, "max_tool_calls": None, "seed": 3,
        "stream_options": {"include_obfuscation": False}, "safety_identifier": "x", "background": False, "cache_salt": "s",
    }  # fmt: skip
    answer = posted(server, **fields, max_output_tokens=1)
    assert answer.status_code == 200 and "x-ignored-fields" not in answer.headers
    assert posted(server, frobnicate=1, max_output_tokens=1).headers["x-ignored-fields"] == "frobnicate"


def test_the_first_turns_are_left_out_if_a_client_asks_for_that(server, monkeypatch):
    turns = [{"role": role, "content": f"{number} words"} for number in range(20) for role in ("user", "assistant")]
    turns.append({"role": "user", "content": "and now?"})
    fields = {"instructions": "be brief", "max_output_tokens": 1}
    expected = response(server, input=turns[-5:], **fields).usage.input_tokens
    assert response(server, input=turns, truncation="auto", **fields).usage.input_tokens > 4 * expected
    monkeypatch.setattr(server.app.state.service, "max_prompt_tokens", expected)
    for items in (turns, turns[-7:], turns[-5:]):
        answer = response(server, input=items, truncation="auto", **fields)
        assert (answer.usage.input_tokens, answer.truncation) == (expected, "auto")
    monkeypatch.setattr(server.app.state.service, "max_prompt_tokens", 3)
    for truncation in ("auto", "disabled", None):
        refused = posted(server, input=turns, truncation=truncation, **fields)
        assert refused.json()["error"]["code"] == "context_length_exceeded", refused.text


def test_errors_name_the_items_of_the_client(server):
    user, call = {"role": "user", "content": "x"}, {"type": "function_call", "name": "f", "arguments": "{}"}
    wrong = {"role": "", "content": "x"}
    first = response(server, max_output_tokens=1).id
    for fields, name in (
        ({"input": [wrong]}, "input.0.role"),
        ({"input": [user, call, call, wrong], "instructions": "be brief"}, "input.3.role"),
        ({"input": [user, wrong], "instructions": "be brief", "previous_response_id": first}, "input.1.role"),
        ({"instructions": [wrong]}, "instructions.role"),
    ):
        error = posted(server, **fields).json()["error"]
        assert error["message"].startswith(f"{name} ") and error["param"] == name.partition(".")[0], error


def test_an_error_within_a_stream_is_an_event(server, monkeypatch):
    monkeypatch.setattr("kvpage.server.answers.transcript.Transcript.take", lambda *_: 1 / 0)
    last = events(server)
    assert [event.type for event in last[-2:]] == ["error", "response.failed"]
    assert last[-2].code == "internal_error" and last[-1].response.status == "failed"


def test_openais_client_streams_a_response():
    with (
        agent_server("hermes", thinks=True) as server,  # `serving` closes it
        serving(server.app, server.live) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="x") as client,
    ):
        with forced(server, [THOUGHT + CALL, THOUGHT + "Yes."]):
            with client.responses.stream(model=NAME, input="hi", tools=[WEATHER]) as stream:
                names = [event.type for event in stream]
                first = stream.get_final_response()
            second = client.responses.create(
                model=NAME, previous_response_id=first.id,
                input=[{"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "rain"}],
            )  # fmt: skip
        assert "response.function_call_arguments.delta" in names
        assert json.loads(first.output[-1].arguments) == {"city": "Bonn", "days": 2}
        assert second.output_text == "Yes."
        assert client.responses.retrieve(second.id).output_text == "Yes."


# --- parts -------------------------------------------------------------------------------------------------------------


def test_items_of_one_turn_are_one_message():
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x"}]}
    result = {"type": "function_call_output", "call_id": "1", "output": "y"}
    user = {"role": "user", "content": "z"}
    [first, turn, answer, last] = messages_of([user, thought, said, call, call, result, said])
    assert (first, last) == (user, {"role": "assistant", "content": said["content"]})
    assert turn["reasoning_content"] == "hm" and turn["content"] == said["content"] and len(turn["tool_calls"]) == 2
    assert answer == {"role": "tool", "tool_call_id": "1", "content": "y"}
    assert len(messages_of([thought, call, result, thought, call])) == 3


def test_kept_responses_are_bounded_and_chains_outlive_others():
    kept = KeptResponses(3, 10**6)

    def keep(name: str, previous: str | None = None) -> None:
        kept.keep("t", {"id": name}, [{"content": name}], previous)

    keep("a")
    keep("b", "a")
    keep("x")
    keep("c", "b")  # the oldest use is x's
    assert [message["content"] for message in kept.messages("t", "c")] == ["a", "b", "c"]
    with pytest.raises(ApiError):
        kept.response("t", "x")
    keep("y")
    assert len(kept) == 3
    with pytest.raises(ApiError):
        kept.response("t", "c")
    assert [message["content"] for message in kept.messages("t", "b")] == ["a", "b"]
    kept.forget("t", "b")
    assert kept.messages("t", None) == []
    assert kept.num_bytes == len('{"id":"a"}[{"content":"a"}]') + len('{"id":"y"}[{"content":"y"}]')
    for limits in ((0, 10**6), (3, 0), (3, 40)):
        none = KeptResponses(*limits)
        none.keep("t", {"id": "a", "text": "x" * 50}, [], None)
        assert len(none) == 0 and none.num_bytes == 0
    kept.keep("t", {"id": "large", "text": "x" * 10**6}, [], None)
    assert len(kept) == 2, "a response too large for all room pushes no other one out"
    assert json.loads(kept.response("t", "a")) == {"id": "a"}


@pytest.mark.parametrize("limits", [(4, 10**6), (100, 400)])
def test_a_tenant_pushes_out_its_own_responses_first(limits):
    kept = KeptResponses(*limits)
    kept.keep("small", {"id": "a", "text": "x" * 50}, [], None)
    for number in range(10):
        kept.keep("large", {"id": str(number), "text": "x" * 50}, [], None)
    assert json.loads(kept.response("small", "a"))["id"] == "a" and json.loads(kept.response("large", "9"))["id"] == "9"
    assert len(kept) <= limits[0] and kept.num_bytes <= limits[1]
    with pytest.raises(ApiError):
        kept.response("large", "0")


def test_bytes_bound_the_memory_of_responses_that_are_kept():
    """As objects, these messages would take dozens of times their bytes."""
    kept, messages = KeptResponses(1024, 10**6), [{"role": "user", "content": [{}] * 1000}]
    tracemalloc.start()
    for number in range(1024):
        kept.keep("t", {"id": str(number)}, json.loads(json.dumps(messages)), None)
    num_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert 9 * 10**5 < kept.num_bytes <= 10**6 and num_bytes < 2 * 10**6


@pytest.mark.parametrize("name", ["metadata", "tool_choice"])
def test_a_number_that_is_none_in_json_is_refused(server, name):
    value = '{"a": 1e999}' if name == "metadata" else '{"type": "function", "name": "get_weather", "a": 1e999}'
    body = json.dumps({"input": "x", "max_output_tokens": 1, "tools": [WEATHER], name: 0}).replace(
        f'"{name}": 0', f'"{name}": {value}'
    )

    async def posted() -> Any:
        async with server.client(**{"content-type": "application/json"}) as client:
            return await client.post(PATH, content=body)

    answer = asyncio.run(posted())
    assert answer.status_code == 400 and answer.json()["error"]["param"] == name, answer.text

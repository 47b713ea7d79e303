# ruff: noqa: E501 - a body is read as one
"""Calls of tools and thoughts in chats: parsed, streamed, and guided, in the format of each model."""

import asyncio
import json
import re

import pytest
from server.test_bad_input import check_refused
from support.agent_server import CALLS, agent_server, forced
from support.server_app import NAME, events_of

pytest.importorskip("llguidance")

PATH = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "the weather?"}]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Bonn", "Köln"]}, "days": {"type": "integer", "enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "Tell it", "parameters": CITY}}
STOP = {"type": "function", "function": {"name": "stop"}}
TOOLS = [WEATHER, STOP]
BONN = {"city": "Bonn", "days": 2}
SPOKEN = {
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bonn", "days": 2}}\n</tool_call>',
    "qwen3-coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nBonn\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
                   "</function>\n</tool_call>",
    "glm": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Bonn</arg_value>\n<arg_key>days</arg_key>\n"
           "<arg_value>2</arg_value>\n</tool_call>",
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
            '{"city": "Bonn", "days": 2}<|tool_call_end|><|tool_calls_section_end|>',
    "deepseek-v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
                   '{"city": "Bonn", "days": 2}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
                '{"city": "Bonn", "days": 2}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "mistral": '[TOOL_CALLS]get_weather[ARGS]{"city": "Bonn", "days": 2}',
    "mistral-list": '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Bonn", "days": 2}}]',
    "llama3": '{"name": "get_weather", "parameters": {"city": "Bonn", "days": 2}}',
    "gpt-oss": "<|channel|>analysis<|message|>Bonn?<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
               '<|constrain|>json<|message|>{"city": "Bonn", "days": 2}',
}  # fmt: skip


def posted(server, **fields):
    body = {"model": NAME, "messages": HELLO, "temperature": 0, "max_tokens": 400, "tools": TOOLS, **fields}
    return asyncio.run(server.post(PATH, body))


def message(server, **fields) -> dict:
    answer = posted(server, **fields)
    assert answer.status_code == 200, answer.text
    [choice] = answer.json()["choices"]
    return {**choice["message"], "finish_reason": choice["finish_reason"]}


def streamed(server, **fields) -> dict:
    """Return the message that the deltas of a stream make, without ids."""
    answer = posted(server, stream=True, **fields)
    made: dict = {"content": "", "reasoning_content": "", "calls": [], "finish_reason": None, "num_parts": 0}
    for event in events_of(answer.text):
        for choice in event["choices"]:
            delta = choice["delta"]
            made["content"] += delta.get("content") or ""
            made["reasoning_content"] += delta.get("reasoning_content", "")
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    assert call["index"] == len(made["calls"]) and call["type"] == "function" and call["id"]
                    made["calls"].append([call["function"]["name"], ""])
                made["calls"][call["index"]][1] += call["function"]["arguments"]
                made["num_parts"] += 1
            made["finish_reason"] = choice["finish_reason"] or made["finish_reason"]
    return made


def calls_of(message: dict) -> list[list[str]]:
    return [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", ())]


@pytest.fixture(scope="module", params=SPOKEN)
def spoken(request):
    with agent_server(request.param) as server:
        yield request.param, server


def test_a_call_is_parsed_whole_and_streamed(spoken):
    name, server = spoken
    assert server.app.state.service.syntax.name == name
    text = SPOKEN[name]
    with forced(server, [text, text, text]):
        whole, parts = message(server), streamed(server)
        hidden = message(server, tool_choice="none")
    [call] = whole["tool_calls"]
    assert call["type"] == "function" and call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]) == BONN
    assert whole["content"] is None and whole["finish_reason"] == parts["finish_reason"] == "tool_calls"
    assert parts["calls"] == calls_of(whole) and parts["num_parts"] > 3
    assert parts["reasoning_content"] == whole.get("reasoning_content", "")
    assert parts["content"] == "" and "tool_calls" not in hidden and "Bonn" in hidden["content"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_guide_makes_the_model_call_in_its_own_format(spoken, choice):
    _, server = spoken
    fields = {"tool_choice": choice, "seed": 3, "temperature": 1.0, "tools": [WEATHER], "reasoning_effort": "none"}
    whole, parts = message(server, **fields), streamed(server, **fields)
    assert whole["finish_reason"] == "tool_calls" and whole["tool_calls"]
    for call in whole["tool_calls"]:
        arguments = json.loads(call["function"]["arguments"])
        assert call["function"]["name"] == "get_weather"
        assert arguments["city"] in CITY["properties"]["city"]["enum"] and arguments["days"] in (1, 2)
        assert set(arguments) == {"city", "days"}
    assert parts["calls"] == calls_of(whole)
    assert choice == "required" or len(whole["tool_calls"]) == 1


def test_the_history_of_calls_goes_on(spoken):
    name, server = spoken
    with forced(server, [SPOKEN[name]]):
        first = message(server)
    reply = {key: first[key] for key in ("role", "content", "tool_calls")}
    result = {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": "it rains"}
    answer = "<|channel|>final<|message|>It rains." if name == "gpt-oss" else "It rains."
    with forced(server, [answer]):
        last = message(server, messages=[*HELLO, reply, result])
    assert last["content"] == "It rains." and last["finish_reason"] == "stop"


# --- one format --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def thinker():
    with agent_server("hermes", thinks=True) as server:
        yield server


def test_thoughts_are_apart(thinker):
    text = "<think>\nBonn, so\n</think>\n\nIt is sunny."
    for fields in ({}, {"tools": None}, {"tool_choice": "none"}):
        with forced(thinker, [text, text]):
            whole, parts = message(thinker, **fields), streamed(thinker, **fields)
        for found in (whole, parts):
            assert (found["reasoning_content"], found["content"]) == ("Bonn, so", "It is sunny.")
    with forced(thinker, [text, text]):
        assert "<think>" in message(thinker, separate_reasoning=False)["content"]
        assert "reasoning_content" not in message(thinker, include_reasoning=False)


def test_thoughts_come_before_a_call_that_must_be(thinker):
    for _ in range(3):
        found = message(thinker, tool_choice="required", chat_template_kwargs={"enable_thinking": False})
        assert found["tool_calls"] and "reasoning_content" not in found and found["content"] is None


def test_several_calls_may_be_forbidden(thinker):
    two = f"{SPOKEN['hermes']}\n{SPOKEN['hermes']}"
    with forced(thinker, [two, two, two]):
        assert len(message(thinker)["tool_calls"]) == 2
        assert len(message(thinker, parallel_tool_calls=False)["tool_calls"]) == 1
        assert len(streamed(thinker, parallel_tool_calls=False)["calls"]) == 1
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    for seed in range(4):
        found = message(thinker, tool_choice="required", parallel_tool_calls=False, temperature=1.0, seed=seed, **off)
        assert len(found["tool_calls"]) == 1


def test_malformed_calls_stay_content_and_cut_ones_stay_calls(thinker):
    for text in ('<tool_call>\nget_weather("Bonn")\n</tool_call>', '<tool_call>\n{"nam": 1}\n</tool_call>'):
        with forced(thinker, [text, text]):
            found = message(thinker)
            assert found["content"] == text and "tool_calls" not in found and found["finish_reason"] == "stop"
            assert streamed(thinker)["content"] == text
    with forced(thinker, [SPOKEN["hermes"]]):
        found = message(thinker, max_tokens=45)
    assert found["finish_reason"] == "length" and '{"city'.startswith(
        found["tool_calls"][0]["function"]["arguments"][:6]
    )


def test_tools_and_a_form_of_json_leave_the_model_the_choice(thinker):
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {
        "type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}}}  # fmt: skip
    kinds = set()
    for seed in range(12):
        found = message(thinker, response_format=form, temperature=1.5, seed=seed, tools=[WEATHER],
                        chat_template_kwargs={"enable_thinking": False})  # fmt: skip
        if found.get("tool_calls"):
            assert all(json.loads(call["function"]["arguments"])["days"] in (1, 2) for call in found["tool_calls"])
        else:
            assert isinstance(json.loads(found["content"])["ok"], bool)
        kinds.add(bool(found.get("tool_calls")))
    assert kinds == {True, False}


def test_strict_tools_are_guided_wherever_a_call_begins():
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    with agent_server("hermes") as server:
        mark = server.tokenizer.convert_tokens_to_ids("<tool_call>")
        fields = {"logit_bias": {str(mark): 100}, "tools": [strict], "max_tokens": 120}
        found = message(server, **fields)
        assert found["tool_calls"] and all(
            json.loads(call["function"]["arguments"])["city"] in ("Bonn", "Köln") for call in found["tool_calls"][:1]
        )
        loose = message(server, **{**fields, "tools": [WEATHER]})
        assert "tool_calls" not in loose
        assert message(server, tools=[strict], max_tokens=5)["finish_reason"] == "length"


def test_an_unknown_format_is_said_and_calls_that_must_be_are_guided(caplog):
    with caplog.at_level("INFO", "kvpage"), agent_server("none") as server:
        assert any("unknown" in record.getMessage() for record in caplog.records)
        about = asyncio.run(server.get("/kvpage/about")).json()
        assert about["tool_calls"] == server.app.state.service.syntax.in_words
        found = message(server, tool_choice="required", tools=[WEATHER])
        assert json.loads(found["tool_calls"][0]["function"]["arguments"])["city"] in ("Bonn", "Köln")
        text = '{"name": "get_weather", "arguments": {}}'
        with forced(server, [text]):
            assert message(server)["content"] == text


def test_the_format_is_said_at_start(caplog):
    with caplog.at_level("INFO", "kvpage"), agent_server("kimi"):
        assert any("format kimi" in record.getMessage() for record in caplog.records)


def test_choices_of_tools_that_are_none_are_refused(thinker):
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice, tools in (
        (3, TOOLS), ("any", TOOLS), ({"type": "function"}, TOOLS), ("required", None), ("required", []), (named, None),
        ({"type": "function", "function": {"name": "x"}}, TOOLS), ({"type": "allowed_tools", "allowed_tools": []}, TOOLS),
    ):  # fmt: skip
        check_refused(posted(thinker, tool_choice=choice, tools=tools), param="tool_choice")
    check_refused(posted(thinker, tool_choice="required", guided_regex="a"), param="tool_choice")
    wrong = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"type": "nothing"}}}
    check_refused(posted(thinker, tool_choice="required", tools=[wrong]), param="tool_choice")


def test_allowed_tools_are_the_only_ones_that_are_called(thinker):
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "stop"}}]}
    for seed in range(4):
        found = message(
            thinker, tool_choice={"type": "allowed_tools", "allowed_tools": allowed}, temperature=1.0, seed=seed,
            chat_template_kwargs={"enable_thinking": False},
        )  # fmt: skip
        assert {name for name, _ in calls_of(found)} == {"stop"}
        assert all(json.loads(arguments) == {} for _, arguments in calls_of(found))


def test_samples_have_calls_of_their_own(thinker):
    answer = posted(thinker, tool_choice="required", n=3, temperature=1.0, seed=5, tools=[WEATHER],
                    chat_template_kwargs={"enable_thinking": False}).json()  # fmt: skip
    ids = [call["id"] for choice in answer["choices"] for call in choice["message"]["tool_calls"]]
    assert len(answer["choices"]) == 3 and len(set(ids)) == len(ids)


def test_log_probabilities_and_usage_count_all_tokens(thinker):
    fields = {"tool_choice": "required", "logprobs": True, "tools": [WEATHER],
              "chat_template_kwargs": {"enable_thinking": False}}  # fmt: skip
    answer = posted(thinker, **fields).json()
    assert len(answer["choices"][0]["logprobs"]["content"]) == answer["usage"]["completion_tokens"]
    events = events_of(posted(thinker, stream=True, **fields).text)
    shown = [entry for event in events for entry in (event["choices"][0]["logprobs"] or {}).get("content", ())]
    assert shown == answer["choices"][0]["logprobs"]["content"]


def test_each_format_has_a_template_here():
    assert set(SPOKEN) | {"none"} == set(CALLS)
    assert all(re.search("get_weather", text) for text in SPOKEN.values())

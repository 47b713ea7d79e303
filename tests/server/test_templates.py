"""Templates of many families: every message is in the prompt, whatever form the template takes it in, or an error."""

import json

import pytest
from support.chat_templates import SYSTEM, TEMPLATES, TOOLS
from support.server_app import make_tokenizer

from kvpage.server.protocol.chat_request import ChatRequest
from kvpage.server.protocol.errors import ApiError
from kvpage.server.protocol.request_model import read_model
from kvpage.server.routes.prompts import chat_of
from kvpage.server.text.chat_template import ChatTemplate

CALL_ID = "call12345"
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
BAD_ARGUMENTS = [
    '{"value": "',
    '{"value": "He said "hello" and left"}',
    "[1]",
    "3",
    "null",
    '{"a": 1}{"b": 2}',
    "",
    "NaN",
    '{"value": "a\nb"}',
    '{"value": NaN}',
    "[" * 500 + "]" * 500,
]


def rendered(template: str, messages: list, **fields) -> str:
    body = read_model(ChatRequest, {"messages": messages, **fields})
    return ChatTemplate(template).render(make_tokenizer(), chat_of(body)).text


def refused(template: str, messages: list, **fields) -> str:
    with pytest.raises(ApiError) as caught:
        rendered(template, messages, **fields)
    assert (caught.value.status, caught.value.param) == (400, "messages") and len(caught.value.message) < 500
    return caught.value.message


def said(role: str, text: str) -> dict:
    return {"role": role, "content": text}


def called(arguments: object, text: str | None = None, call_id: str = CALL_ID) -> dict:
    function = {"name": "weather", "arguments": arguments}
    return {**said("assistant", text), "tool_calls": [{"id": call_id, "type": "function", "function": function}]}


def result(text: str) -> dict:
    return {**said("tool", text), "tool_call_id": CALL_ID, "name": "weather"}


def check(name: str, messages: list, *parts: str) -> None:
    prompt = rendered(TEMPLATES[name], messages)
    for part in parts:
        assert part in prompt, f"{name} leaves out {part!r}: {prompt}"
    assert (
        "None" not in prompt and "kvpagemark" not in prompt and "'city':" not in prompt and '\\"city' not in prompt
    ), prompt


def test_there_are_many_families():
    assert len(TEMPLATES) >= 30


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_message_is_in_the_prompt(name):
    turns = [said("user", "first question"), said("assistant", "first answer"), said("user", "second question")]
    texts = "first question", "first answer", "second question"
    if name in SYSTEM:
        check(name, [said("system", "be short"), *turns], "be short", *texts)
    else:
        assert "System role not supported" in refused(TEMPLATES[name], [said("system", "be short"), *turns])
    check(name, turns, *texts)
    parts = [{"role": one["role"], "content": [{"type": "text", "text": one["content"]}]} for one in turns]
    assert rendered(TEMPLATES[name], parts) == rendered(TEMPLATES[name], turns)


@pytest.mark.parametrize("name", sorted(TOOLS))
@pytest.mark.parametrize("text", [None, "", "let me look"])
def test_calls_and_results_are_in_the_prompt(name, text):
    for arguments in ('{"city": "Bonn"}', {"city": "Bonn"}):
        turns = [said("user", "is it raining"), called(arguments, text), result("no rain"), said("user", "thanks")]
        shown = "is it raining", "weather", "city", "Bonn", "no rain", "thanks"
        drops_text = name in ("mistral 3", "llama 3.1")
        check(name, turns, *shown, *([text] if text and not drops_text else []))


@pytest.mark.parametrize("name", sorted(TOOLS))
def test_arguments_that_are_no_object_end_no_conversation(name):
    for arguments in BAD_ARGUMENTS:
        turns = [said("user", "is it raining"), called(arguments), result("invalid"), said("user", "again")]
        prompt = rendered(TEMPLATES[name], turns)
        assert "weather" in prompt and "again" in prompt
        if arguments == '{"value": "':
            assert arguments in prompt or json.dumps(arguments)[1:-1] in prompt


@pytest.mark.parametrize("name", sorted(set(TEMPLATES) - TOOLS - {"llama 2", "mistral 1", "gemma 2", "gemma 3"}))
def test_calls_that_a_template_does_not_show_are_an_error(name):
    message = refused(
        TEMPLATES[name], [said("user", "is it raining"), called("{}", "let me look"), said("user", "thanks")]
    )
    assert message == "messages.1: the chat template does not show the tool calls of a message of the role 'assistant'"


def test_a_message_that_a_template_leaves_out_is_named():
    template = "{% for m in messages %}{% if m.role in ('user', 'assistant') %}{{ m.content }}{% endif %}{% endfor %}"
    message = refused(template, [said("user", "x"), said("critic", "x"), said("user", "x")])
    assert message == "messages.1: the chat template does not show the text of a message of the role 'critic'"


def test_developers_are_systems_where_a_template_knows_no_developers():
    shown = "{% if m.role in ('user', 'system') %}<{{ m.role }}>{{ m.content }}{% endif %}"
    template = "{% for m in messages %}" + shown + "{% endfor %}"
    turns = [said("developer", "be short"), said("user", "hello")]
    assert rendered(template, turns) == "<system>be short<user>hello"
    assert rendered(PLAIN, turns) == "<developer>be short<user>hello"


def test_text_that_looks_like_python_or_none_is_kept():
    turns = [said("user", "None"), said("assistant", "'city': None"), said("user", "kvpagemark0t0z")]
    assert rendered(PLAIN, turns) == "<user>None<assistant>'city': None<user>kvpagemark0t0z"


def test_a_message_without_content_is_empty_text():
    assert rendered(PLAIN, [said("user", "hello"), said("assistant", None)]) == "<user>hello<assistant>"
    assert rendered(PLAIN, [said("user", [])]) == "<user>"


def test_thoughts_and_prefixes_reach_the_template():
    template = PLAIN.replace(
        "{{ m.content }}", "{{ m.reasoning_content }}|{{ m.reasoning }}|{{ m.prefix }}|{{ m.content }}"
    )
    thought = {"type": "thinking", "thinking": "y"}
    for more in ({"reasoning": "y"}, {"reasoning_content": "y"}, {"content": [thought, {"type": "text", "text": "x"}]}):
        message = {**said("assistant", "x"), "prefix": True, **more}
        assert rendered(template, [message]) == "<assistant>y|y|True|x"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"reasoning_effort": "low"}, "low|"),
        ({"reasoning": {"effort": "high", "enabled": False}}, "high|False"),
        ({"enable_thinking": False}, "|False"),
        ({"thinking": {"type": "disabled"}}, "|False"),
        ({"thinking": {"type": "enabled"}}, "|True"),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "max"}}, "max|"),
        ({}, "|"),
    ],
)
def test_fields_of_thinking_reach_the_template(fields, expected):
    assert rendered("{{ reasoning_effort }}|{{ enable_thinking }}" + PLAIN, [said("user", "x")], **fields).startswith(
        expected + "<"
    )


FAILURES = ["1 / 0", "2.0 ** 9999", "[] | first | int + {}", "nothing.at.all", "messages[99].x", "recursive()"]


@pytest.mark.parametrize("expression", [*FAILURES, "raise_exception('no')"])
def test_errors_of_a_template_are_the_requests(expression):
    template = "{% macro recursive() %}{{ recursive() }}{% endmacro %}{{ " + expression + " }}" + PLAIN
    assert refused(template, [said("user", "x")]).startswith("messages do not suit the chat template: ")

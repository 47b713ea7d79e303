"""Answers by a tokenizer's own description of them, its response_template."""

import asyncio
import copy
import random

import pytest
from server.test_tool_calls import TOOLS as CHAT_TOOLS
from support.agent_server import agent_server, forced
from support.answer_texts import TOOLS
from support.seeds import seed_of
from support.tokenizers_made import byte_level

from kvpage.server.answers.calls.answer_parser import Asked
from kvpage.server.answers.calls.said import Said
from kvpage.server.answers.calls.syntax import syntax_of

TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<assistant>",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<call>", "close": "</call>", "repeats": True, "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"\s*<end>", "content": "text"},
    },
}  # fmt: skip
CALL = '<call>{"name": "weather", "arguments": {"city": "Bonn"}}</call>'
BONN = ("weather", '{"city": "Bonn"}')
ANSWERS = {
    "It is sunny.": ("It is sunny.", "", []),
    "<think>hm</think>Yes.": ("Yes.", "hm", []),
    f"<think>hm</think>I look.\n{CALL}\n{CALL}": ("I look.", "hm", [BONN, BONN]),
    '<call>{"name": weather}</call> so': ('<call>{"name": weather}</call> so', "", []),
    f"<call>[1]</call>{CALL}": ("<call>[1]</call>", "", [BONN]),
    '<call>{"name": 5, "arguments": {}}</call>': ('<call>{"name": 5, "arguments": {}}</call>', "", []),
    '<call>{"name": "", "arguments": {}}</call>': ('<call>{"name": "", "arguments": {}}</call>', "", []),
    '<call>{"name": "weather", "arguments": {"a": "\\ud800"}}</call>': ("", "", [("weather", '{"a": "\\ud800"}')]),
    '<call>{"name": "weather", "argum': ('<call>{"name": "weather", "argum', "", []),
}

pytestmark = pytest.mark.skipif(
    not hasattr(byte_level(), "get_response_parser"), reason="this transformers reads no response_template"
)


@pytest.fixture
def syntax():
    tokenizer = copy.deepcopy(byte_level())
    tokenizer.response_template = TEMPLATE
    return syntax_of(tokenizer, None)


def parsed(syntax, text: str, cuts: list[int], **fields) -> tuple:
    parser, said = syntax.make(Asked(**{"tools": TOOLS, "thinks": True, **fields})), Said()
    for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        said.add(parser.feed(text[begin:end]))
    said.add(parser.finish())
    return said.content, said.reasoning, [(call.name, call.arguments) for call in said.calls]


@pytest.mark.parametrize("text", ANSWERS)
def test_an_answer_is_parsed_the_same_wherever_it_is_cut(syntax, text):
    assert parsed(syntax, text, []) == ANSWERS[text]
    for cut in range(len(text) + 1):
        assert parsed(syntax, text, [cut]) == ANSWERS[text], text[:cut]
    draws = random.Random(seed_of(2))
    for _ in range(20):
        assert parsed(syntax, text, sorted(draws.randrange(len(text)) for _ in range(4))) == ANSWERS[text]


def test_the_prompts_end_counts(syntax):
    assert parsed(syntax, "hm</think>Yes.", [], prompt="<user>x<assistant><think>") == ("Yes.", "hm", [])


def test_without_tools_a_call_is_text(syntax):
    assert parsed(syntax, CALL, [], tools={}) == (CALL, "", [])


def test_a_server_takes_the_tokenizers_description():
    with agent_server("none") as server:
        server.tokenizer.response_template = TEMPLATE
        service = server.app.state.service
        service.syntax = syntax_of(server.tokenizer, None)
        body = {"messages": [{"role": "user", "content": "x"}], "tools": CHAT_TOOLS, "max_tokens": 200}
        with forced(server, [f"I look.{CALL}"]):
            answer = asyncio.run(server.post("/v1/chat/completions", body)).json()["choices"][0]
        assert answer["message"]["content"] == "I look." and answer["finish_reason"] == "tool_calls"
        must = {"tool_choice": "required", "reasoning_effort": "none"}  # its thoughts might take all tokens
        demanded = asyncio.run(server.post("/v1/chat/completions", {**body, **must})).json()
        assert demanded["choices"][0]["message"]["tool_calls"]

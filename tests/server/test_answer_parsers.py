"""Answers apart: thoughts, content and calls of each format, wherever the text is cut."""

import json
import random
import re

import pytest
from support.answer_texts import FORMATS, TOOLS, AnswerText
from support.seeds import seed_of

from kvpage.server.answers.calls.answer_parser import AnswerParser, Asked
from kvpage.server.answers.calls.harmony import HarmonyParser
from kvpage.server.answers.calls.json_calls import bare, deepseek, hermes, kimi, mistral
from kvpage.server.answers.calls.said import Said
from kvpage.server.answers.calls.xml_calls import glm, qwen_coder

MAKERS = {
    "hermes": hermes, "mistral": mistral, "deepseek": deepseek, "kimi": kimi, "bare": bare, "qwen coder": qwen_coder,
    "glm": glm, "harmony": HarmonyParser, "thoughts": AnswerParser,
}  # fmt: skip
CASES = [(name, case) for name, cases in FORMATS.items() for case in cases]


def parsed(name: str, case: AnswerText, *cuts: int) -> Said:
    """Return all that a parser says of a text that comes in pieces."""
    tools = {} if case.no_tools else TOOLS
    parser = MAKERS[name](Asked(tools, case.thinks, case.in_thought, one_call=case.one_call))
    said, begins = Said(), [0, *sorted(cuts), len(case.text)]
    for begin, end in zip(begins, begins[1:], strict=False):
        said.add(parser.feed(case.text[begin:end]))
    said.add(parser.finish())
    return said


def in_parts(said: Said) -> tuple[str, str, list[tuple[str | None, str]]]:
    return said.content, said.reasoning, [(call.name, call.arguments) for call in said.calls]


def names_of(case: AnswerText) -> str:
    return re.sub(r"\W+", "_", case.text)[:40]


@pytest.mark.parametrize(("name", "case"), CASES, ids=[f"{name}-{names_of(case)}" for name, case in CASES])
def test_an_answer_is_parsed_the_same_wherever_it_is_cut(name, case):
    expected = case.content, case.reasoning, list(case.calls)
    assert in_parts(parsed(name, case)) == expected
    length = len(case.text)
    for cut in range(length + 1):
        assert in_parts(parsed(name, case, cut)) == expected, case.text[:cut]
    assert in_parts(parsed(name, case, *range(1, length))) == expected
    draws = random.Random(seed_of(0))
    for _ in range(40):
        cuts = [draws.randrange(length + 1) for _ in range(draws.randrange(1, 6))]
        assert in_parts(parsed(name, case, *cuts)) == expected, cuts


@pytest.mark.parametrize("name", MAKERS)
def test_random_texts_of_marks_are_parsed_the_same_wherever_they_are_cut(name):
    draws = random.Random(seed_of(1))
    pieces = sorted({piece for case in FORMATS[name] for piece in re.findall(r"<[^<>]*>|\[\w+\]|\w+|\W", case.text)})
    for _ in range(60):
        text = "".join(draws.choice(pieces) for _ in range(draws.randrange(30)))
        case = AnswerText(text, thinks=draws.random() < 0.5)
        whole = in_parts(parsed(name, case))
        assert in_parts(parsed(name, case, *range(1, len(text)))) == whole, text
        for _ in range(8):
            cuts = [draws.randrange(len(text) + 1) for _ in range(3)]
            assert in_parts(parsed(name, case, *cuts)) == whole, (text, cuts)


@pytest.mark.parametrize("name", sorted(set(MAKERS) - {"thoughts"}))
def test_cut_answers_lose_nothing_but_marks(name):
    """An answer that max_tokens cuts: its words are all there, as content, thoughts or arguments."""
    for case in FORMATS[name]:
        for end in range(len(case.text)):
            cut = AnswerText(case.text[:end], case.thinks, case.in_thought)
            content, reasoning, calls = in_parts(parsed(name, cut))
            shown = content + reasoning + "".join(f"{call}{arguments}" for call, arguments in calls)
            for word in re.findall(r"Bonn|Grüße|sunny|answer", cut.text):
                assert word in shown


def test_the_name_comes_first_and_arguments_in_pieces():
    parser = hermes(Asked(TOOLS))
    parts = []
    for character in '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>':
        parts += parser.feed(character).calls
    parts += parser.finish().calls
    assert (parts[0].index, parts[0].name) == (0, "weather") and parts[0].call_id.startswith("call_")
    assert all(part.name is None and part.call_id is None and len(part.arguments) == 1 for part in parts[1:])
    assert json.loads("".join(part.arguments for part in parts)) == {"city": "Bonn"}


def test_ids_are_the_formats_own_where_it_has_some():
    text = "<|tool_call_begin|>functions.weather:3<|tool_call_argument_begin|>{}<|tool_call_end|>"
    assert [call.call_id for call in kimi(Asked(TOOLS)).feed(text).calls] == ["functions.weather:3"]
    [call] = mistral(Asked(TOOLS, short_ids=True)).feed("[TOOL_CALLS]weather[ARGS]{}").calls
    assert re.fullmatch("[a-zA-Z0-9]{9}", call.call_id)
    [call] = mistral(Asked(TOOLS)).feed("[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{}").calls
    assert call.call_id == "abcdefghi"


def test_a_long_text_of_blanks_or_marks_takes_no_time_beyond_its_length():
    """Nothing but a few characters waits, so that each piece is looked at a bounded number of times."""
    for name, make in MAKERS.items():
        for piece in (
            " \n<",
            "<tool_call>{",
            '{"name": "',
            "<function=",
            "[TOOL_CALLS]",
            "<｜tool▁call▁begin｜>function",
        ):
            parser, num_taken = make(Asked(TOOLS, thinks=True)), 0
            for _ in range(1000):
                said = parser.feed(piece)
                num_taken += len(said.content)
                assert len(parser._text) < 600, (name, piece)
            assert num_taken > 1000, (name, piece)


def test_values_of_tags_have_the_types_of_the_schema():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": ["string", "null"]},
                                               "c": {"enum": ["x"]}, "d": {}}}  # fmt: skip
    parser = qwen_coder(Asked({"f": schema}))
    values = {"a": "7", "b": "null", "c": "x", "d": "[1]", "e": "7"}
    tags = "".join(f"<parameter={key}>\n{value}\n</parameter>" for key, value in values.items())
    [call] = parser.feed(f"<tool_call>\n<function=f>\n{tags}\n</function>\n</tool_call>").calls
    assert json.loads(call.arguments) == {"a": 7, "b": None, "c": "x", "d": [1], "e": "7"}


def test_half_a_character_in_a_call_is_left_as_it_was_written():
    """JSON can name half of a character, which no UTF-8 has: such a text could not be sent or kept."""
    whole = '<tool_call>{"arguments": {"a": "\\ud800"}, "name": "weather"}</tool_call>'
    named = '<tool_call>{"name": "\\ud800", "arguments": {"a": 1}}</tool_call>'
    for text, expected in (
        (whole, ("", "", [("weather", '{"a": "\\ud800"}')])),
        (named, ("", "", [("\\ud800", '{"a": 1}')])),
    ):
        parser = hermes(Asked(TOOLS))
        said = parser.feed(text)
        said.add(parser.finish())
        assert in_parts(said) == expected

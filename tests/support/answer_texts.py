# ruff: noqa: E501 - a text is read as one
"""Answers as models write them, in each format, with their thoughts, content and calls."""

from collections.abc import Sequence
from dataclasses import dataclass

WEATHER = "weather"
TOOLS = {
    WEATHER: {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "of": {"type": "object"}},
        "required": ["city"],
    },
    "write_file": {"type": "object", "properties": {"path": {"type": "string"}, "text": {"type": "string"}}},
}


@dataclass(frozen=True)
class AnswerText:
    """A text, and what it means."""

    text: str
    thinks: bool = False
    in_thought: bool = False
    one_call: bool = False
    no_tools: bool = False
    content: str = ""
    reasoning: str = ""
    calls: Sequence[tuple[str, str]] = ()


BONN, TWO = '{"city": "Bonn"}', '{"city": "Bonn", "days": 2, "of": {"a": [1, "}]"], "b": "\\"<\\\\"}}'


def hermes_call(arguments: str, name: str = WEATHER) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def coder_call(**values: str) -> str:
    tags = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function=weather>\n{tags}</function>\n</tool_call>"


def glm_call(**values: str) -> str:
    tags = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in values.items())
    return f"<tool_call>weather\n{tags}</tool_call>"


def deepseek_call(arguments: str) -> str:
    return f"<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"


def kimi_call(arguments: str, number: int = 0) -> str:
    return f"<|tool_call_begin|>functions.weather:{number}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


PLAIN = [
    AnswerText("", content=""),
    AnswerText(" It is sunny.\n\n", content=" It is sunny.\n\n"),
    AnswerText("a < b, {x}, <tool_cal and <thin>", content="a < b, {x}, <tool_cal and <thin>"),
    AnswerText(hermes_call(BONN), no_tools=True, content=hermes_call(BONN)),
]
THOUGHTS = [
    AnswerText("<think>\nIs Bonn\nsunny?\n</think>\n\nYes.", thinks=True, reasoning="Is Bonn\nsunny?", content="Yes."),
    AnswerText("Is it?\n</think>\n\nYes.\n", thinks=True, in_thought=True, reasoning="Is it?", content="Yes.\n"),
    AnswerText("Is it? </thin", thinks=True, in_thought=True, reasoning="Is it? </thin"),
    AnswerText("<think>\n\n</think>\n\nYes.", thinks=True, content="Yes."),
    AnswerText("No <think>thought</think>", thinks=True, content="No <think>thought</think>"),
    AnswerText("<think>x</think>y", content="<think>x</think>y"),
]
FORMATS: dict[str, list[AnswerText]] = {
    "thoughts": [*PLAIN, *THOUGHTS],
    "hermes": [
        *PLAIN,
        *THOUGHTS,
        AnswerText(hermes_call(BONN), calls=[(WEATHER, BONN)]),
        AnswerText(hermes_call(TWO) + "\n", calls=[(WEATHER, TWO)]),
        AnswerText("Let me see.\n" + hermes_call(BONN) + "\n" + hermes_call("{}"), content="Let me see.", calls=[(WEATHER, BONN), (WEATHER, "{}")]),
        AnswerText(hermes_call(BONN) + "\n" + hermes_call("{}"), one_call=True, calls=[(WEATHER, BONN)]),
        AnswerText("<think>hm</think>\n\n" + hermes_call(BONN), thinks=True, reasoning="hm", calls=[(WEATHER, BONN)]),
        AnswerText(hermes_call('{"city": "Grüße \\n"}', "a\\\"b"), calls=[('a"b', '{"city": "Grüße \\n"}')]),
        AnswerText('<tool_call>{"name":"weather","arguments":{"city":"Bonn"}}</tool_call>', calls=[(WEATHER, '{"city":"Bonn"}')]),
        AnswerText('<tool_call>\n{"arguments": {"city": "Bonn"}, "name": "weather"}\n</tool_call>', calls=[(WEATHER, BONN)]),
        AnswerText('<tool_call>\n{"name": "weather", "arguments": "{\\"city\\": \\"Bonn\\"}"}\n</tool_call> answer', calls=[(WEATHER, BONN)], content="answer"),
        AnswerText('<tool_call>\nweather Bonn\n</tool_call>', content='<tool_call>\nweather Bonn\n</tool_call>'),
        AnswerText('<tool_call>\n{"nam": "Bonn"}\n</tool_call>', content='<tool_call>\n{"nam": "Bonn"}\n</tool_call>'),
        AnswerText('<tool_call>\n{"name": "weather", "arguments": 3}\n</tool_call>', content='<tool_call>\n{"name": "weather", "arguments": 3}\n</tool_call>'),
        AnswerText('<tool_call>\n{"name": "weather", "arguments": {"city": "Bo', calls=[(WEATHER, '{"city": "Bo')]),
        AnswerText('<tool_call>\n{"name": "weather", "arguments": {"city": \'Bonn\'}}', calls=[(WEATHER, '{"city": ')], content="'Bonn'}}"),
        AnswerText('<tool_call>\n{"name": "weather", "arguments": {"a": {}\n</tool_call>', calls=[(WEATHER, '{"a": {}\n')], content="</tool_call>"),
    ],
    "mistral": [
        *PLAIN,
        *THOUGHTS,
        AnswerText(f'[TOOL_CALLS] [{{"name": "weather", "arguments": {BONN}}}]', calls=[(WEATHER, BONN)]),
        AnswerText(f'[TOOL_CALLS][{{"name": "weather", "arguments": {TWO}}}, {{"name": "weather", "arguments": {{}}}}]', calls=[(WEATHER, TWO), (WEATHER, "{}")]),
        AnswerText(f"Hm.[TOOL_CALLS]weather[ARGS]{BONN}[TOOL_CALLS]weather[ARGS]{TWO}", content="Hm.", calls=[(WEATHER, BONN), (WEATHER, TWO)]),
        AnswerText(f"[TOOL_CALLS]weather{BONN}", calls=[(WEATHER, BONN)]),
        AnswerText(f"[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{BONN}", calls=[(WEATHER, BONN)]),
        AnswerText("[TOOL_CALLS] weather of Bonn", content="[TOOL_CALLS] weather of Bonn"),
    ],
    "deepseek": [
        *PLAIN,
        *THOUGHTS,
        AnswerText(f"See.\n\n<｜tool▁calls▁begin｜>{deepseek_call(BONN)}{deepseek_call(TWO)}<｜tool▁calls▁end｜>", content="See.", calls=[(WEATHER, BONN), (WEATHER, TWO)]),
        AnswerText(f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{BONN}\n```<｜tool▁call▁end｜>\n"
                   f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{TWO}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>", calls=[(WEATHER, BONN), (WEATHER, TWO)]),
        AnswerText(f"hm</think>{deepseek_call(BONN)}", thinks=True, in_thought=True, reasoning="hm", calls=[(WEATHER, BONN)]),
    ],
    "kimi": [
        *PLAIN,
        *THOUGHTS,
        AnswerText(f"See.<|tool_calls_section_begin|>{kimi_call(BONN)}{kimi_call(TWO, 1)}<|tool_calls_section_end|>", content="See.", calls=[(WEATHER, BONN), (WEATHER, TWO)]),
        AnswerText("<|tool_call_begin|>Bonn<|tool_call_end|>", content="<|tool_call_begin|>Bonn<|tool_call_end|>"),
    ],
    "bare": [
        *PLAIN,
        *THOUGHTS,
        AnswerText(f'{{"name": "weather", "parameters": {BONN}}}', calls=[(WEATHER, BONN)]),
        AnswerText(f'<|python_tag|>{{"type": "function", "name": "weather", "parameters": {TWO}}}', calls=[(WEATHER, TWO)]),
        AnswerText(f'{{"name": "weather", "parameters": {BONN}}}; {{"name": "write_file", "arguments": {{}}}}', calls=[(WEATHER, BONN), ("write_file", "{}")]),
        AnswerText(f'{{"name": "weather", "parameters": {BONN}}}; {{"name": "Ann", "parameters": {{}}}}', calls=[(WEATHER, BONN)], content='; {"name": "Ann", "parameters": {}}'),
        AnswerText('{"name": "Ann", "parameters": {}}', content='{"name": "Ann", "parameters": {}}'),
        AnswerText('{"name": "weather", "age": 3}', content='{"name": "weather", "age": 3}'),
    ],
    "qwen coder": [
        *PLAIN,
        *THOUGHTS,
        AnswerText("See.\n" + coder_call(city="Bonn"), content="See.", calls=[(WEATHER, BONN)]),
        AnswerText(coder_call(city='a "b"\n<c>\n', days="2") + "\n" + coder_call(), calls=[(WEATHER, '{"city": "a \\"b\\"\\n<c>\\n", "days": 2}'), (WEATHER, "{}")]),
        AnswerText(coder_call(of='{"a": [1]}', days="two"), calls=[(WEATHER, '{"of": {"a": [1]}, "days": "two"}')]),
        AnswerText("<function=weather>\n<parameter=city>\nBonn\n</parameter>\n</function>", calls=[(WEATHER, BONN)]),
        AnswerText("<tool_call>\n<function=weather>\n<parameter=city>\nBo", calls=[(WEATHER, '{"city": "Bo')]),
        AnswerText("<tool_call>\n<function=weather>\n<parameter=city>\nBonn\n</parameter>\nanswer", calls=[(WEATHER, BONN)], content="answer"),
        AnswerText("<tool_call>\nweather\n</tool_call>", content="<tool_call>\nweather\n</tool_call>"),
    ],
    "glm": [
        *PLAIN,
        *THOUGHTS,
        AnswerText("See.\n" + glm_call(city="Bonn", days="2"), content="See.", calls=[(WEATHER, '{"city": "Bonn", "days": 2}')]),
        AnswerText("<tool_call>weather</tool_call>\n" + glm_call(city="Bonn"), calls=[(WEATHER, "{}"), (WEATHER, BONN)]),
        AnswerText("<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Bo</arg_val", calls=[(WEATHER, '{"city": "Bo</arg_val')]),
    ],
    "harmony": [
        *(case for case in PLAIN if not case.text.startswith(" ")),
        AnswerText("<|channel|>final<|message|>It is sunny.", content="It is sunny."),
        AnswerText("<|channel|>analysis<|message|>Bonn?<|end|><|start|>assistant<|channel|>final<|message|>Yes.\n", thinks=True, reasoning="Bonn?", content="Yes.\n"),
        AnswerText(f"<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{TWO}<|call|>", reasoning="Hm", calls=[(WEATHER, TWO)]),
        AnswerText(f" to=functions.weather<|channel|>commentary json<|message|>{BONN}", calls=[(WEATHER, BONN)]),
        AnswerText(f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.weather<|channel|>commentary<|message|>{BONN}", content="I look.", calls=[(WEATHER, BONN)]),
        AnswerText("<|channel|>analysis<|message|>Bonn", reasoning="Bonn"),
    ],
}  # fmt: skip

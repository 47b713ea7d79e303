"""XmlCalls: calls whose arguments are text between tags.

    qwen coder  <tool_call><function=look><parameter=city>Bonn</parameter></function></tool_call>
    glm         <tool_call>look<arg_key>city</arg_key><arg_value>Bonn</arg_value></tool_call>

The schema of a tool says which arguments are strings. Such a one is handed out as it comes, others once they are whole.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pydantic_core
import regex

from kvpage.server.answers.calls.answer_parser import BLANKS, AnswerParser, Asked, MarkedCalls, Pattern, Wait

PYTHON = {"True": "true", "False": "false", "None": "null"}


@dataclass(frozen=True, slots=True)
class XmlMarks:
    """How calls are written.

    Attributes:
        begin: From the first mark to the first argument; its group `name` is the tool.
        key: The begin of an argument; its group `key` is the name.
        value_end: The end of an argument.
        ends: After the last argument, one after the other; the later ones may be missing.
        skips_line: Whether a new line before a value belongs to the mark.
    """

    begin: Pattern
    key: Pattern
    value_end: Pattern
    ends: tuple[Pattern, ...]
    skips_line: bool


class XmlCalls(MarkedCalls[XmlMarks]):
    """Parses answers with such calls."""

    def _answer(self) -> Wait:
        while match := (yield from self._until(self._marks.begin, self._add_content)):
            name = match["name"].strip()
            self._begin_call(name)
            yield from self._arguments(self.asked.tools.get(name, {}))
            yield from self._skip_blanks()

    def _arguments(self, schema: Mapping[str, Any]) -> Wait:
        before, is_whole = "{", True
        while is_whole and (match := (yield from self._matched(self._marks.key))):
            key = match["key"].strip()
            self._add_arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
            before = ", "
            if self._marks.skips_line:
                yield from self._skip_line()
            is_whole = yield from (self._text_value() if is_text(schema, key) else self._value())
        if not is_whole or (self._is_over and not self._text):
            return  # it was cut, and so are its arguments
        self._add_arguments("{}" if before == "{" else "}")
        for pattern in self._marks.ends:
            if not (yield from self._matched(pattern)):
                return

    def _skip_line(self) -> Wait:
        while not self._text and not self._is_over:
            yield
        self._text = self._text.removeprefix("\n")

    def _text_value(self) -> Wait:
        self._add_arguments('"')
        end = yield from self._until(self._marks.value_end, lambda text: self._add_arguments(_escaped(text)))
        if end is not None:
            self._add_arguments('"')
        return end is not None

    def _value(self) -> Wait:
        pieces = list[str]()
        end = yield from self._until(self._marks.value_end, pieces.append)
        self._add_arguments(as_json("".join(pieces)))
        return end is not None


def is_text(schema: Mapping[str, Any], key: str) -> bool:
    """Return whether an argument is a string, and nothing else. Unknown ones are.

    Args:
        schema: Of the tool's parameters.
        key: The argument's name.
    """
    properties = schema.get("properties")
    described = properties.get(key) if isinstance(properties, dict) else None
    if not isinstance(described, dict):
        return True
    if "type" in described:
        return described["type"] in ("string", ["string"])
    choices = described.get("enum")
    return isinstance(choices, list) and all(isinstance(choice, str) for choice in choices)


def as_json(text: str) -> str:
    """Return a value as JSON: as it is, if it is JSON, else as a string."""
    shown = text.strip()
    shown = PYTHON.get(shown, shown)
    try:
        pydantic_core.from_json(shown, allow_inf_nan=False)
    except ValueError:
        return json.dumps(text, ensure_ascii=False)
    return shown


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def qwen_coder(asked: Asked) -> AnswerParser:
    """Return a parser of the format of Qwen3-Coder and Qwen 3.5."""
    begin = rf"{BLANKS}(?:<tool_call>{BLANKS})?<function=(?P<name>[^>\n]{{1,256}})>"
    key, value_end = rf"{BLANKS}<parameter=(?P<key>[^>\n]{{1,256}})>", r"\n?</parameter>"
    ends = rf"{BLANKS}</function>", rf"{BLANKS}</tool_call>"
    return XmlCalls(asked, _compiled(begin, key, value_end, ends, True))


def glm(asked: Asked) -> AnswerParser:
    """Return a parser of the format of GLM 4.5 and later ones."""
    begin = rf"{BLANKS}<tool_call>{BLANKS}(?P<name>[^\s<>{{}}]{{1,256}}){BLANKS}(?P<rest><arg_key>|</tool_call>)"
    key = rf"{BLANKS}<arg_key>(?P<key>[^<]{{1,256}})</arg_key>{BLANKS}<arg_value>"
    return XmlCalls(asked, _compiled(begin, key, "</arg_value>", (rf"{BLANKS}</tool_call>",), False))


def _compiled(begin: str, key: str, value_end: str, ends: tuple[str, ...], skips_line: bool) -> XmlMarks:
    compiled = regex.compile
    return XmlMarks(compiled(begin), compiled(key), compiled(value_end), tuple(map(compiled, ends)), skips_line)

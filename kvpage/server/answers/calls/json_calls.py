"""JsonCalls: calls whose arguments are a JSON object, between the marks of a format.

hermes    <tool_call>{"name": "look", "arguments": {"city": "Bonn"}}</tool_call>
mistral   [TOOL_CALLS]look[ARGS]{"city": "Bonn"}
deepseek  <｜tool▁call▁begin｜>look<｜tool▁sep｜>{"city": "Bonn"}<｜tool▁call▁end｜>
kimi      <|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{"city": "Bonn"}<|tool_call_end|>
llama     {"name": "look", "parameters": {"city": "Bonn"}}
"""

import json
from dataclasses import dataclass
from typing import Any

import regex

from kvpage.server.answers.calls.answer_parser import BLANKS, AnswerParser, Asked, MarkedCalls, Pattern, Wait
from kvpage.server.answers.calls.said import as_utf8

LIST_END = regex.compile(r"\]")
MAX_WHOLE = 4096  # characters of a call that waits for its end: its fields come in another order


@dataclass(frozen=True, slots=True)
class JsonMarks:
    """How calls are written.

    Attributes:
        begin: From the first mark to the arguments, which are its group `rest`. Its group `name` is the tool, `id` the
            call's id. The group `whole` is a call in any other form of JSON.
        end: After the arguments; it may be missing.
        more: From there to the arguments of a next call.
        first_only: Whether calls begin at the begin of an answer only, and are of known tools.
    """

    begin: Pattern
    end: Pattern
    more: Pattern | None = None
    first_only: bool = False


class JsonCalls(MarkedCalls[JsonMarks]):
    """Parses answers with such calls."""

    def _answer(self) -> Wait:
        marks = self._marks
        if marks.first_only:
            if match := (yield from self._matched(marks.begin)):
                yield from self._calls(match)
            return
        while match := (yield from self._until(marks.begin, self._add_content)):
            groups = match.groupdict()
            if groups.get("whole") is not None:
                yield from self._whole(match)
            elif groups.get("name") is not None:
                yield from self._calls(match)
            else:  # a mark around several calls
                yield from self._skip_blanks()

    def _calls(self, match: Any) -> Wait:
        """Parse a call and those that follow it at once."""
        while match:
            name = _unescaped(match["name"])
            if self._marks.first_only and name not in self.asked.tools:
                self._add_content(match.group()[: match.start("rest") - match.start()])
                return
            self._begin_call(name, match.groupdict().get("id"))
            yield from self._json()
            yield from self._matched(self._marks.end)
            match = None if self._marks.more is None else (yield from self._matched(self._marks.more))
        yield from self._skip_blanks()

    def _whole(self, match: Any) -> Wait:
        """Take a call that is here as a whole; leave it in the content if it is none."""
        try:
            call = json.loads(match["whole"])
        except (ValueError, RecursionError):
            call = None
        arguments = call.get("arguments", call.get("parameters")) if isinstance(call, dict) else None
        if not isinstance(arguments, dict | str) or not isinstance(name := call.get("name"), str) or not name:
            self._add_content(match.group())
            return
        self._begin_call(as_utf8(name))
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        self._add_arguments(as_utf8(text))
        yield from self._skip_blanks()


def _unescaped(name: str) -> str:
    """Return a name as JSON means it; as it is, where it is no string of JSON."""
    try:
        return as_utf8(str(json.loads(f'"{name}"')))
    except ValueError:
        return name


def _head() -> str:
    """Return the pattern of an object from its begin to its arguments."""
    kind = r'\{_(?:"type"_:_"function"_,_)?"name"_:_"'.replace("_", BLANKS)
    arguments = r'"_,_"(?:arguments|parameters)"_:_(?P<rest>\{)'.replace("_", BLANKS)
    return rf'{kind}(?P<name>(?:[^"\\]|\\.){{1,256}}){arguments}'


def hermes(asked: Asked) -> AnswerParser:
    """Return a parser of the format of Hermes, Qwen and others."""
    whole = rf"{BLANKS}(?P<whole>\{{(?:(?!</?tool_call>).){{1,{MAX_WHOLE}}}+)</tool_call>"
    begin = rf"{BLANKS}<tool_call>(?:{BLANKS}{_head()}|{whole})"
    end = rf"{BLANKS}\}}{BLANKS}</tool_call>"
    return JsonCalls(asked, JsonMarks(regex.compile(begin, regex.DOTALL), regex.compile(end)))


def mistral(asked: Asked) -> AnswerParser:
    """Return a parser of the format of Mistral: a list of objects, or a name and its arguments."""
    name = r"(?P<name>[^\s\[\]{}\"]{1,256})(?:\[CALL_ID\](?P<id>\w{1,64}))?(?:\[ARGS\])?" + BLANKS + r"(?P<rest>\{)"
    begin = rf"{BLANKS}\[TOOL_CALLS\]{BLANKS}(?:\[?{BLANKS}{_head()}|{name})"
    more = rf"{BLANKS},{BLANKS}{_head()}|{BLANKS}\[TOOL_CALLS\]{BLANKS}{name}"
    end = rf"{BLANKS}\}}"
    return MistralCalls(asked, JsonMarks(regex.compile(begin), regex.compile(end), regex.compile(more)))


class MistralCalls(JsonCalls):
    """The same with the end of a list after the last call."""

    def _calls(self, match: Any) -> Wait:
        yield from super()._calls(match)
        yield from self._matched(LIST_END)
        yield from self._skip_blanks()


def deepseek(asked: Asked) -> AnswerParser:
    """Return a parser of the formats of DeepSeek."""
    fenced = r"function<｜tool▁sep｜>(?P<name>[^\s<]{1,256})_```json_(?P<rest>\{)"
    plain = r"(?P<name>[^\s<]{1,256})<｜tool▁sep｜>_(?P<rest>\{)"
    begin = rf"_(?:<｜tool▁calls▁(?:begin|end)｜>|<｜tool▁call▁begin｜>(?:{fenced}|{plain}))".replace("_", BLANKS)
    end = r"_(?:```_)?<｜tool▁call▁end｜>".replace("_", BLANKS)
    return JsonCalls(asked, JsonMarks(regex.compile(begin), regex.compile(end)))


def kimi(asked: Asked) -> AnswerParser:
    """Return a parser of the format of Kimi, whose calls have ids."""
    name = r"(?P<id>(?:functions\.)?(?P<name>[^\s:<]{1,256}):\d{1,9})"
    call = rf"<\|tool_call_begin\|>{BLANKS}{name}{BLANKS}<\|tool_call_argument_begin\|>{BLANKS}(?P<rest>\{{)"
    begin = rf"{BLANKS}(?:<\|tool_calls_section_(?:begin|end)\|>|{call})"
    end = rf"{BLANKS}<\|tool_call_end\|>"
    return JsonCalls(asked, JsonMarks(regex.compile(begin), regex.compile(end)))


def bare(asked: Asked) -> AnswerParser:
    """Return a parser of calls without marks, as Llama 3 has them: an answer that begins with one, of a known tool."""
    begin = rf"{BLANKS}(?:<\|python_tag\|>)?{BLANKS}{_head()}"
    more = rf"{BLANKS}[;,]?{BLANKS}{_head()}"
    end = rf"{BLANKS}\}}"
    return JsonCalls(asked, JsonMarks(regex.compile(begin), regex.compile(end), regex.compile(more), first_only=True))

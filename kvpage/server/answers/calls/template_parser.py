"""TemplateParser: answers by a tokenizer's own description of them, its `response_template`.

transformers reads the description, and finds the regions of the text. Calls are whole when they come. A region that
cannot be read, such as a call that is no JSON, is content, with the marks around it.
"""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

from kvpage.server.answers.calls.answer_parser import AnswerParser, Asked, Wait
from kvpage.server.answers.calls.said import as_utf8

THOUGHTS = frozenset({"reasoning_content", "reasoning", "thinking"})
CALLS = "tool_calls"


class TemplateParser(AnswerParser):
    """Parses answers as a template describes them.

    Args:
        asked: The facts of the request.
        tokenizer: The tokenizer, whose `get_response_parser` is asked.
    """

    def __init__(self, asked: Asked, tokenizer: Any) -> None:
        self._tokenizer, self._regions_text = tokenizer, ""
        self._regions = self._new_regions(asked.prompt)
        super().__init__(asked)

    def _new_regions(self, prompt: str) -> Any:
        return self._tokenizer.get_response_parser(prefix=prompt)

    def _parse(self) -> Wait:
        """Take the text character by character: so the text of each region is known, with its marks."""
        while True:
            for character in self._text:
                self._regions_text += character
                self._take(partial(self._regions.feed, character))
            self._text = ""
            if self._is_over:
                self._take(lambda: list(self._regions.finalize()[1]))
                return
            yield

    def _take(self, step: Callable[[], list[dict[str, Any]]]) -> None:
        """Take the events of a step. Where it fails, its region becomes content, and the next one begins."""
        try:
            for event in step():
                self._take_event(event["type"], event["field"], event)
        except (ValueError, TypeError, AttributeError, LookupError, RecursionError):
            self._add_content(self._regions_text)
            self._regions_text, self._regions = "", self._new_regions("")

    def _take_event(self, kind: str, region: str, event: dict[str, Any]) -> None:
        if region == CALLS and self.asked.tools:
            if kind != "region_close":
                return  # its text is kept until it is whole
            self._add_calls(event["value"])
        elif region == CALLS:
            self._add_content(self._regions_text)
        elif kind == "region_chunk":
            take = self._add_thought if region in THOUGHTS else self._add_content
            take(event["text"])
        self._regions_text = ""

    def _add_calls(self, value: Any) -> None:
        functions = [call.get("function", call) for call in (value if isinstance(value, list) else [value])]
        for name, arguments in [_call(function) for function in functions]:
            self._begin_call(name)
            self._add_arguments(arguments)


def _call(function: dict[str, Any]) -> tuple[str, str]:
    """Return name and arguments. Raises ValueError or LookupError without a name."""
    name, value = function["name"], function.get("arguments", {})
    arguments = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if not isinstance(name, str) or not name:
        raise ValueError("name must be a text")
    return as_utf8(name), as_utf8(arguments)

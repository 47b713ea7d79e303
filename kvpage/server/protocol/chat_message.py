"""ChatMessage: one message of a chat, apart from how a template takes it; and its marked twin.

message   role, texts, calls of tools          ─► ChatForm ─► the dictionary that a template gets
twin      the same shape, with marks as texts  ─► ChatForm ─► a prompt in which each mark is looked for
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

MARK = "kvpagemark"
MARKS = re.compile(rf"{MARK}\d+[tc]\d+z(?:0key0|0val0)?")
DEVELOPER, SYSTEM = "developer", "system"


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool that the model has made.

    Attributes:
        name: The tool.
        text: The arguments as the model has written them, JSON or not.
        arguments: The arguments as an object; None where the text is no JSON object.
        more: Other fields of the call, such as its id.
    """

    name: str
    text: str
    arguments: dict[str, Any] | None
    more: dict[str, Any] = field(default_factory=dict)

    def marked(self, mark: str) -> "Call":
        """Return a call of the same shape whose name and arguments hold the mark."""
        arguments = None if self.arguments is None else {f"{mark}0key0": f"{mark}0val0"}
        text = f"{mark}0val0" if arguments is None else f'{{"{mark}0key0": "{mark}0val0"}}'
        return replace(self, name=mark, text=text, arguments=arguments)


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """A message.

    Attributes:
        role: The one who speaks.
        texts: Its content in parts, without empty ones.
        calls: The calls of tools in it.
        more: Other fields that templates know, such as "name" and "reasoning_content".
    """

    role: str
    texts: Sequence[str] = ()
    calls: Sequence[Call] = ()
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def is_bare_call(self) -> bool:
        """Whether it only calls tools, and says nothing."""
        return bool(self.calls) and not self.texts

    def marked(self, index: int) -> "ChatMessage":
        """Return its twin. index: its place in the chat."""
        texts = [text_mark(index, number) for number in range(len(self.texts))]
        return replace(self, texts=texts, calls=[c.marked(call_mark(index, n)) for n, c in enumerate(self.calls)])

    def split(self) -> "list[ChatMessage]":
        """Return it as two messages where it both speaks and calls tools: some templates show one of these alone."""
        if not self.texts or not self.calls:
            return [self]
        return [replace(self, calls=()), replace(self, texts=(), more={})]


def text_mark(index: int, number: int) -> str:
    """Return the mark of a part of a message's content."""
    return f"{MARK}{index}t{number}z"


def call_mark(index: int, number: int) -> str:
    """Return the mark of a call."""
    return f"{MARK}{index}c{number}z"


def call_marks(index: int, number: int) -> set[str]:
    """Return the marks that show a call: that of its name, and that of its arguments."""
    mark = call_mark(index, number)
    return {mark, f"{mark}0val0"}

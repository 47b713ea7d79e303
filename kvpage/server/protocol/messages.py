"""Message: one message of a chat's body, in every shape that clients send.

content   a text, a part, or a list of parts; a part is text, or an object with text and without or with its type
calls     arguments as JSON text, as an object, or as a text that was to be JSON when it was cut
"""

import json
from typing import Annotated, Any

import pydantic_core
from pydantic import Field, field_validator

from kvpage.server.protocol.chat_message import Call, ChatMessage
from kvpage.server.protocol.errors import bad_request
from kvpage.server.protocol.request_model import RequestModel

TEXT_TYPES = frozenset({"text", "input_text", "output_text", "refusal"})
THOUGHT_TYPES = frozenset({"thinking", "reasoning"})
TEXT_FIELDS = ("text", "refusal", "thinking", "reasoning")
"""Fields of a part that may hold its text; for a part without a type the first of them."""
REASONING = ("reasoning_content", "reasoning")
"""The names that templates have for thoughts of an earlier answer. Both get the value of either."""
MAX_CALLS = 1024


class Part(RequestModel, extra="ignore"):
    """A part of a message's content. Only text is served."""

    type: str = "text"
    text: str = ""
    refusal: str = ""
    thinking: str | list[Any] = ""
    reasoning: str = ""

    @field_validator("type")
    @classmethod
    def _is_text(cls, value: str) -> str:
        if value not in TEXT_TYPES | THOUGHT_TYPES:
            raise ValueError(f"messages: content must be text, parts of the type {value[:40]!r} are not served")
        return value

    @property
    def is_thought(self) -> bool:
        """Whether it is a thought, and no content."""
        return self.type in THOUGHT_TYPES

    @property
    def shown(self) -> str:
        """Its text."""
        if self.is_thought:
            return self.thinking if isinstance(self.thinking, str) and self.thinking else self.reasoning or self.text
        return self.text or self.refusal


class Message(RequestModel, extra="ignore"):
    """One message. Fields that a template may know are passed to it."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: Annotated[list[dict[str, Any]], Field(max_length=MAX_CALLS)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    prefix: bool | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _as_parts(cls, value: object) -> object:
        """Take a part for a list of one, and text within a list for a part."""
        parts = [value] if isinstance(value, dict) else value
        if isinstance(parts, list):
            return [{"text": part} if isinstance(part, str) else part for part in parts]
        return value

    def for_template(self) -> ChatMessage:
        """Return the message apart from its shape in the body. ApiError 400 for a call without a function."""
        parts = self.content if isinstance(self.content, list) else []
        texts = [part.shown for part in parts if not part.is_thought] if parts else [self._text]
        more = {
            name: value for name in ("name", "tool_call_id", "prefix") if (value := getattr(self, name)) is not None
        }
        thoughts = "\n".join(part.shown for part in parts if part.is_thought)
        if reasoning := self.reasoning_content or self.reasoning or thoughts:
            more |= dict.fromkeys(REASONING, reasoning)
        calls = [_call(call) for call in self.tool_calls or ()]
        return ChatMessage(self.role, [text for text in texts if text], calls, more)

    @property
    def _text(self) -> str:
        return self.content if isinstance(self.content, str) else ""


def _call(call: dict[str, Any]) -> Call:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(name := function.get("name"), str) or not name:
        raise bad_request("messages: tool_calls must have a function with a name", param="messages")
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else _as_json(arguments)
    parsed = _as_object(text)
    more = {"type": "function"} | {key: value for key, value in call.items() if key != "function" and value is not None}
    return Call(name, text, parsed, more)


def _as_json(arguments: object) -> str:
    return "" if arguments is None else json.dumps(arguments, ensure_ascii=False)


def _as_object(text: str) -> dict[str, Any] | None:
    """Return the object that arguments are; none at all are an empty one. None for all other text.

    This reader takes bounded nesting only.
    """
    try:
        parsed = pydantic_core.from_json(text) if text.strip() else {}
    except ValueError:
        return None
    return {} if parsed is None else parsed if isinstance(parsed, dict) else None

"""ChatForm: one way in which templates take messages.

Templates are written for one model each, and differ in the forms of content and of arguments of calls:

    content                 "text", or [{"type": "text", "text": "text"}]
    content beside calls    none, or ""
    arguments               {"city": "Bonn"}, or '{"city": "Bonn"}'
"""

import re
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

from kvpage.server.protocol.chat_message import (
    DEVELOPER,
    MARK,
    MARKS,
    SYSTEM,
    Call,
    ChatMessage,
    call_marks,
    text_mark,
)

ArgumentsForm = Literal["object", "wrapped", "text"]
"""Objects, with other text as it is; objects, with other text within one; all as text."""
MISSPELT = re.compile(rf"""(?:\{{'|\\")({MARK}\d+c\d+z)0key0""")


@dataclass(frozen=True, slots=True)
class ChatForm:
    """A way to write messages down for a template.

    Attributes:
        part_roles: The roles whose content is a list of parts; that of others is one text.
        arguments: How arguments of calls are written.
        no_content: The content of a message that only calls tools.
        splits: Whether a message that speaks and calls tools becomes two.
        developer: The role of developers' messages.
    """

    part_roles: frozenset[str] = frozenset()
    arguments: ArgumentsForm = "object"
    no_content: str | None = None
    splits: bool = False
    developer: str = DEVELOPER

    def written(self, messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
        """Return the messages as a template gets them."""
        parts = [part for message in messages for part in (message.split() if self.splits else [message])]
        return [self._message(message) for message in parts]

    def _message(self, message: ChatMessage) -> dict[str, Any]:
        role = self.developer if message.role == DEVELOPER else message.role
        made = {"role": role, "content": self._content(message), **message.more}
        if message.calls:
            made["tool_calls"] = [self._call(call) for call in message.calls]
        return made

    def _content(self, message: ChatMessage) -> Any:
        if message.is_bare_call:
            return self.no_content
        if message.role in self.part_roles:
            return [{"type": "text", "text": text} for text in message.texts]
        return "\n".join(message.texts)

    def _call(self, call: Call) -> dict[str, Any]:
        arguments: Any = call.text if self.arguments == "text" or call.arguments is None else call.arguments
        if self.arguments == "wrapped" and call.arguments is None:
            arguments = {"arguments": call.text}
        return {**call.more, "function": {"name": call.name, "arguments": arguments}}


def possible_forms(messages: Sequence[ChatMessage]) -> Iterator[ChatForm]:
    """Yield the forms that differ for these messages, the most common ones first."""
    calls = [call for message in messages for call in message.calls]
    arguments: list[ArgumentsForm] = ["object"]
    if any(call.arguments is None for call in calls):
        arguments.append("wrapped")
    if calls:
        arguments.append("text")
    no_content = (None, "") if any(message.is_bare_call for message in messages) else (None,)
    splits = (False, True) if any(message.texts and message.calls for message in messages) else (False,)
    developers = (DEVELOPER, SYSTEM) if any(message.role == DEVELOPER for message in messages) else (DEVELOPER,)
    for developer, split, of_calls, nothing in product(developers, splits, arguments, no_content):
        yield ChatForm(frozenset(), of_calls, nothing, split, developer)


def with_parts(form: ChatForm, roles: set[str]) -> ChatForm:
    """Return the form with the content of these roles in parts."""
    return replace(form, part_roles=frozenset(roles))


def marks_in(prompt: str) -> set[str]:
    """Return the marks that a prompt of twins shows as a model writes them.

    Python's spelling of an object is none, and neither is an object within a string of JSON.
    """
    return set(MARKS.findall(prompt)) - set(MISSPELT.findall(prompt))


def hidden_texts(marks: Set[str], messages: Sequence[ChatMessage]) -> list[int]:
    """Return the places of the messages whose text is not all there. marks: of the prompt of their twins."""
    numbered = enumerate(messages)
    return [
        i for i, message in numbered if any(text_mark(i, number) not in marks for number in range(len(message.texts)))
    ]


def hidden_calls(marks: Set[str], messages: Sequence[ChatMessage]) -> list[int]:
    """Return the places of the messages whose calls are not all there, by name and by arguments."""
    numbered = enumerate(messages)
    return [
        i for i, message in numbered if any(not call_marks(i, number) <= marks for number in range(len(message.calls)))
    ]


def num_nones(prompt: str) -> int:
    """Return how often a prompt of twins says None: once more for each content that a template prints for nothing."""
    return prompt.count("None")

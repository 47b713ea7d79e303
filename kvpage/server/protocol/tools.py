"""Tool and ToolChoice: the tools of a chat, and whether the model may, must or must not call them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from kvpage.server.protocol.errors import bad_request
from kvpage.server.protocol.request_model import RequestModel

Mode = Literal["none", "auto", "required"]
NONE: Mode = "none"
AUTO: Mode = "auto"
REQUIRED: Mode = "required"
ALLOWED = "allowed_tools"


class Function(RequestModel):
    """A function that the model may call."""

    called: ClassVar[str] = "tools.function."
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(RequestModel):
    """A tool that the template shows to the model."""

    called: ClassVar[str] = "tools."
    type: Literal["function"] = "function"
    function: Function

    def for_template(self) -> dict[str, Any]:
        """Return the tool as templates expect it, without fields that no model was trained with."""
        fields = ("name", "description", "parameters")
        described = {name: value for name in fields if (value := getattr(self.function, name)) is not None}
        return {"type": self.type, "function": described}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the model calls tools.

    Attributes:
        mode: "none", "auto", or "required": at least one call.
        names: The tools that may be called; None for all.
        is_named: Whether a single tool is named: it is called once.
    """

    mode: Mode = AUTO
    names: Sequence[str] | None = None
    is_named: bool = False

    @classmethod
    def of(cls, value: Any, tools: Sequence[Tool]) -> "ToolChoice":
        """Return the choice that a field `tool_choice` means. ApiError 400 for another value, or for other tools.

        value: A word, an object with the name of a function, or one with allowed tools.
        """
        if value is None:
            return cls()
        mode = next((mode for mode in (NONE, AUTO, REQUIRED) if value == mode), None)
        choice = cls._of_object(value) if mode is None else cls(mode)
        known = {tool.function.name for tool in tools}
        if choice.mode == REQUIRED and not tools:
            raise _wrong("needs tools, there are none")
        if others := set(choice.names or ()) - known:
            raise _wrong(f"must name tools of the request, {min(others)[:80]!r} is none")
        return choice

    @classmethod
    def _of_object(cls, value: Any) -> "ToolChoice":
        fields = value if isinstance(value, dict) else {}
        if fields.get("type") == ALLOWED:
            allowed = fields.get(ALLOWED, fields)
            asked, entries = (allowed.get("mode"), allowed.get("tools")) if isinstance(allowed, dict) else (None, None)
            mode = next((mode for mode in (AUTO, REQUIRED) if asked == mode), None)
            names = [_name(entry) for entry in entries] if isinstance(entries, list) else []
            if mode is not None and names and None not in names:
                return cls(mode, [name for name in names if name is not None])
        elif (name := _name(fields)) is not None:
            return cls(REQUIRED, [name], is_named=True)
        raise _wrong('must be "none", "auto", "required", or name a function')


def _name(entry: Any) -> str | None:
    """Return the name of a function, in the shape of chats or in that of responses."""
    if not isinstance(entry, dict) or entry.get("type", "function") != "function":
        return None
    function = entry.get("function", entry)
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) and name else None


def _wrong(rule: str) -> Exception:
    return bad_request(f"tool_choice {rule}", param="tool_choice")

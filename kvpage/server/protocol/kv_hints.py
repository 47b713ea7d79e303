"""KvHints: the envelope of hints on the cache that orchestrators add to a request.

    {"protocol_version": "0.1", "message_id": ..., "actions": [
        {"action_id": ..., "action_type": "kv.pin", "action_version": "1.0", "payload": {"ttl_seconds": 60}}]}

| action | payload | effect |
|---|---|---|
| kv.pin | ttl_seconds | the prompt's blocks are kept for so long, within the quota of pins |
| kv.retain | directives, each with a priority of 0 to 100 | its blocks are evicted after blocks of lower priorities |

Actions of other types or versions are left aside: a hint is no command.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from kvpage.server.config import MAX_HINTED_PRIORITY
from kvpage.server.protocol.request_model import RequestModel, read_model

MAX_ACTIONS, MAX_DIRECTIVES = 16, 128
Text = Annotated[str, Field(max_length=256)]


class Pin(RequestModel, extra="ignore"):
    """The payload of kv.pin."""

    ttl_seconds: Annotated[float, Field(gt=0)]


class Directive(RequestModel, extra="ignore"):
    """A part of the payload of kv.retain. Its range of tokens is not looked at: a prompt is kept as a whole."""

    priority: Annotated[int, Field(ge=0, le=MAX_HINTED_PRIORITY)]


class Retain(RequestModel, extra="ignore"):
    """The payload of kv.retain."""

    directives: Annotated[list[Directive], Field(max_length=MAX_DIRECTIVES)]


class KvHintAction(RequestModel):
    """One hint."""

    called: ClassVar[str] = "kv_hints.actions."
    action_id: Text
    action_type: Text
    action_version: Text
    payload: dict[str, Any] = {}

    def is_a(self, action_type: str) -> bool:
        """Return whether the action is of this type, in a version 1."""
        return self.action_type == action_type and self.action_version.partition(".")[0] == "1"


class KvHints(RequestModel):
    """The hints of one request."""

    called: ClassVar[str] = "kv_hints."
    protocol_version: Literal["0.1"]
    message_id: Text
    actions: Annotated[list[KvHintAction], Field(max_length=MAX_ACTIONS)]

    def pin_ttl(self) -> float | None:
        """Return the seconds for which the prompt is to be pinned; None without such an action."""
        pins = [read_model(Pin, action.payload, "kv_hints") for action in self.actions if action.is_a("kv.pin")]
        return max((pin.ttl_seconds for pin in pins), default=None)

    def retain_priority(self) -> int:
        """Return the priority of the prompt's blocks, 0 to 100."""
        retained = [
            read_model(Retain, action.payload, "kv_hints") for action in self.actions if action.is_a("kv.retain")
        ]
        return max((directive.priority for retain in retained for directive in retain.directives), default=0)

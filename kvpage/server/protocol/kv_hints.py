"""KvHints: the envelope of hints on the cache that orchestrators add to a request.

    {"protocol_version": "0.1", "message_id": ..., "actions": [
        {"action_id": ..., "action_type": "kv.pin", "action_version": "1.0", "payload": {"ttl_seconds": 60}}]}

| action | payload | effect |
|---|---|---|
| kv.pin | ttl_seconds | the prompt's blocks are kept for so long, within the quota of pins |
| kv.retain | directives: priority of 0 to 100, duration | evicted later; for so many seconds kept as by kv.pin |
| kv.release | | blocks that only this prompt needs are evicted before all others, once it is answered |
| kv.demote | | its blocks leave the device for the host, once it is answered |
| kv.next_use | expected_seconds | its session pauses; without one, the eviction "cost" heeds it |
| kv.checkpoint | positions | others will go on there, as `cache_at` says |

Actions of other types or versions, and other fields of payloads, are left aside and counted: a hint is no command.
"""

from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import Field

from kvpage.server.config import MAX_HINTED_PRIORITY
from kvpage.server.protocol.request_model import RequestModel, read_model

MAX_ACTIONS, MAX_DIRECTIVES, MAX_POSITIONS = 16, 128, 64
Model = TypeVar("Model", bound=RequestModel)
Text = Annotated[str, Field(max_length=256)]


class Pin(RequestModel, extra="ignore"):
    """The payload of kv.pin."""

    ttl_seconds: Annotated[float, Field(gt=0)]


class Directive(RequestModel, extra="ignore"):
    """A part of the payload of kv.retain. Its range of tokens is not looked at: a prompt is kept as a whole."""

    priority: Annotated[int, Field(ge=0, le=MAX_HINTED_PRIORITY)]
    start: int | None = None
    end: int | None = None
    duration: Annotated[float, Field(ge=0)] | None = None
    covers_output: bool = False


class Retain(RequestModel, extra="ignore"):
    """The payload of kv.retain."""

    directives: Annotated[list[Directive], Field(max_length=MAX_DIRECTIVES)]
    scope: str | None = None


class Release(RequestModel, extra="ignore"):
    """The payload of kv.release."""


class Demote(RequestModel, extra="ignore"):
    """The payload of kv.demote."""


class NextUse(RequestModel, extra="ignore"):
    """The payload of kv.next_use."""

    expected_seconds: Annotated[float, Field(gt=0)]


class Checkpoint(RequestModel, extra="ignore"):
    """The payload of kv.checkpoint."""

    positions: Annotated[list[Annotated[int, Field(ge=1)]], Field(max_length=MAX_POSITIONS)]


PAYLOADS: dict[str, type[RequestModel]] = {
    "kv.pin": Pin,
    "kv.retain": Retain,
    "kv.release": Release,
    "kv.demote": Demote,
    "kv.next_use": NextUse,
    "kv.checkpoint": Checkpoint,
}
"""The payloads of the actions that are known, in a version 1."""


class KvHintAction(RequestModel):
    """One hint."""

    called: ClassVar[str] = "kv_hints.actions."
    action_id: Text
    action_type: Text
    action_version: Text
    payload: dict[str, Any] = {}

    @property
    def is_known(self) -> bool:
        """Whether the action is one of these, in a version 1."""
        return self.action_type in PAYLOADS and self.action_version.partition(".")[0] == "1"

    def left_aside(self) -> list[str]:
        """Return the names of what is left aside: the action, or fields of its payload."""
        if not self.is_known:
            return [f"{self.called}{self.action_type}"]
        known = PAYLOADS[self.action_type].model_fields
        return [f"{self.called}{self.action_type}.{name}" for name in self.payload if name not in known]


class KvHints(RequestModel):
    """The hints of one request."""

    called: ClassVar[str] = "kv_hints."
    protocol_version: Literal["0.1"]
    message_id: Text
    actions: Annotated[list[KvHintAction], Field(max_length=MAX_ACTIONS)]

    def of_kind(self, kind: type[Model]) -> list[Model]:
        """Return the payloads of one kind. ApiError 400 for one that is wrong.

        kind: One of PAYLOADS.
        """
        return [
            read_model(kind, action.payload, "kv_hints")
            for action in self.actions
            if action.is_known and PAYLOADS[action.action_type] is kind
        ]

    def pin_ttl(self) -> float | None:
        """Return the seconds for which the prompt is to be pinned; None without such an action."""
        times = [pin.ttl_seconds for pin in self.of_kind(Pin)]
        times += [directive.duration for directive in self._directives() if directive.duration and directive.priority]
        return max(times, default=None)

    def retain_priority(self) -> int:
        """Return the priority of the prompt's blocks, 0 to 100."""
        return max((directive.priority for directive in self._directives()), default=0)

    def next_use(self) -> float | None:
        """Return the seconds until the next request of the session; None without such an action."""
        return min((payload.expected_seconds for payload in self.of_kind(NextUse)), default=None)

    def positions(self) -> list[int]:
        """Return the positions at which others will go on."""
        return sorted({position for payload in self.of_kind(Checkpoint) for position in payload.positions})

    def left_aside(self) -> list[str]:
        """Return the names of actions and fields that are left aside."""
        return [name for action in self.actions for name in action.left_aside()]

    def _directives(self) -> list[Directive]:
        return [directive for retain in self.of_kind(Retain) for directive in retain.directives]

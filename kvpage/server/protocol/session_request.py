"""SessionRequest: the body of POST /v1/sessions/ID: one action on a session."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from kvpage.server.protocol.errors import bad_request
from kvpage.server.protocol.request_model import Integer, RequestModel
from kvpage.server.protocol.sampling_fields import Count, Salt, SessionName

MAX_EDIT_TOKENS = 2**20
NEEDED = {
    "pause": ("expected_seconds",),
    "branch": ("branch",),
    "release": ("branch",),
    "edit": ("start", "end"),
}
"""Fields that an action cannot do without."""


class SessionRequest(RequestModel):
    """An action on a session, and its arguments; see Session."""

    action: Literal["retain", "pause", "resume", "branch", "release", "edit"]
    cache_salt: Salt | None = None
    branch: SessionName | None = None
    ttl_seconds: Annotated[float, Field(gt=0)] | None = None
    tier: Literal["device", "host", "store"] = "device"
    priority: Annotated[Integer, Field(ge=0, le=100)] = 0
    expected_seconds: Annotated[float, Field(gt=0)] | None = None
    source: SessionName | None = None
    num_tokens: Count | None = None
    start: Count | None = None
    end: Count | None = None
    tokens: Annotated[list[Count], Field(max_length=MAX_EDIT_TOKENS)] | None = None
    text: str | None = None
    mode: Literal["exact", "erratum"] = "exact"

    @model_validator(mode="after")
    def _has_arguments(self) -> "SessionRequest":
        for name in NEEDED.get(self.action, ()):
            if getattr(self, name) is None:
                raise bad_request(f"{name} must be given to {self.action}", param=name)
        if self.action == "edit" and (self.tokens is None) == (self.text is None):
            raise bad_request("tokens or text must be given to edit, and not both", param="tokens")
        return self

"""ApiError: an error as OpenAI's clients expect it.

{"error": {"message": ..., "type": ..., "param": ..., "code": ...}}

Refusals of the engine become such errors, too.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import TypeVar

from kvpage.serving import EngineClosed, QueueFull, SamplingParams

TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}

MESSAGES_PATH = "/v1/messages"
MESSAGE_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip
UNKNOWN_FIELD = "unknown_field"
CONTEXT_LENGTH = "context_length_exceeded"
TOO_LONG = "prompt and max_tokens must fit into"  # the begin of an engine's refusal
Result = TypeVar("Result")
REFUSED = (ValueError, TypeError, QueueFull, EngineClosed)
OTHER_NAMES = {
    "tokens": "prompt",
    "prompt": "prompt",
    "timeout": "timeout",
    "priority": "priority",
    "cache_at": "cache_at",
}
KNOWN = {field.name: field.name for field in fields(SamplingParams)} | OTHER_NAMES


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: The HTTP status.
        message: A sentence for people.
        param: The field of the request that is wrong.
        code: A word for programs.
        headers: Headers of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def type(self) -> str:
        """The kind of error, by the status."""
        return TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def body_for(self, path: str) -> bytes:
        """Return the error as JSON, as the clients of a path expect it.

        Args:
            path: Of the request.
        """
        return self.message_body() if path.startswith(MESSAGES_PATH) else self.body()

    def message_body(self) -> bytes:
        """Return the error as Anthropic's clients expect it."""
        kind = MESSAGE_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        error = {"type": kind, "message": self.message, "param": self.param, "code": self.code}
        return json.dumps({"type": "error", "error": error}).encode()

    def body(self) -> bytes:
        """Return the error as JSON."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode()


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return the error of a request that cannot be served as it is.

    Args:
        message: The field, its rule and the value.
        param: The field.
        code: A word for programs.
    """
    return ApiError(400, message, param=param, code=code)


def busy(message: str, retry_after: float) -> ApiError:
    """Return the error of a server that cannot take a request now.

    Args:
        message: The reason.
        retry_after: Seconds after which another try makes sense.
    """
    seconds = max(1, round(retry_after + 0.5))
    return ApiError(503, message, code="server_busy", headers={"retry-after": str(seconds)})


def failed() -> ApiError:
    """Return the error of a request at which the server itself has failed. It tells nothing of the cause."""
    return ApiError(500, "the server has failed at this request", code="internal_error")


@contextmanager
def renamed_params(names: Mapping[str, str]) -> Iterator[None]:
    """Name other fields in the errors of the block.

    Args:
        names: The client's name of each field that has another one here.
    """
    try:
        yield
    except ApiError as error:
        name = error.param or ""
        if name in names and error.code != UNKNOWN_FIELD:  # that name is the client's own
            error.param = names[name]
            error.message = re.sub(rf"^{name}(?=[ .:])", names[name], error.message)
        raise


def checked(work: Callable[[], Result]) -> Result:
    """Return the result of `work`. ApiError for a refusal of the engine."""
    try:
        return work()
    except REFUSED as error:
        raise as_api_error(error) from error


def as_api_error(error: Exception) -> ApiError:
    """Return why the engine does not take a request: 503 where it cannot now, else 400 with the field's name."""
    if isinstance(error, QueueFull):
        return busy(str(error), error.retry_after)
    if isinstance(error, EngineClosed):
        return busy(f"the server takes no more requests: {error}", 5)
    text = str(error)
    code = CONTEXT_LENGTH if text.startswith(TOO_LONG) else None
    return bad_request(text, KNOWN.get(text.partition(" ")[0]), code)  # messages begin with the field's name

"""Refusals of the engine, as errors of the API."""

from collections.abc import Callable
from dataclasses import fields
from typing import TypeVar

from kvpage.server.protocol.errors import ApiError, bad_request, busy
from kvpage.serving import EngineClosed, QueueFull, SamplingParams

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
    code = "context_length_exceeded" if text.startswith(TOO_LONG) else None
    return bad_request(text, KNOWN.get(text.partition(" ")[0]), code)  # messages begin with the field's name

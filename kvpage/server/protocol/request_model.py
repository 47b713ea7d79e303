"""RequestModel: the body of a request, each field of exactly its type.

A field that is not served is refused by its name. Three kinds are ignored: those that are null, those that change no
answer here, which are in HARMLESS, and those in UNLESS_ASKED that are false.
"""

from typing import Any, TypeVar

import pydantic_core
from pydantic import BaseModel, ConfigDict, ValidationError

from kvpage.server.protocol.errors import ApiError, bad_request

HARMLESS = frozenset({
    "user", "metadata", "store", "service_tier", "parallel_tool_calls", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "reasoning_effort", "verbosity", "separate_reasoning", "stream_reasoning",
    "include_reasoning",
})  # fmt: skip
"""Fields of OpenAI's clients, and of routers, for bookkeeping, or that a model without them answers all the same."""

UNLESS_ASKED = frozenset({"no_stop_trim", "return_hidden_states"})
"""Fields that routers add to each request as false."""

Model = TypeVar("Model", bound="RequestModel")


class RequestModel(BaseModel):
    """A part of a request's body: strict types, finite numbers, no other fields."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


def parse_json(body: bytes) -> dict[str, Any]:
    """Return the object that a body holds. ApiError for anything else; NaN and infinity are no JSON."""
    try:
        found = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise bad_request(f"body must be JSON: {error}", code="invalid_json") from None
    if not isinstance(found, dict):
        raise bad_request(f"body must be a JSON object, got {type(found).__name__}", code="invalid_json")
    return found


def read_model(kind: type[Model], fields: dict[str, Any], within: str | None = None) -> Model:
    """Check the fields of a body, and return them as `kind`. ApiError with the name of the first wrong one.

    within: the field of the body that holds them; None for the body itself.
    """
    asked = {name: value for name, value in fields.items() if not _is_ignored(name, value)}
    try:
        return kind.model_validate(asked)
    except ValidationError as error:
        raise _as_api_error(error, within) from None


def _is_ignored(name: str, value: object) -> bool:
    return value is None or name in HARMLESS or (value is False and name in UNLESS_ASKED)


def _as_api_error(error: ValidationError, within: str | None) -> ApiError:
    each = error.errors(include_url=False, include_context=False)
    first = max(each, key=lambda one: (one["loc"][:1] == each[0]["loc"][:1], len(one["loc"])))  # unions: the nearest
    place = [part for part in first["loc"] if isinstance(part, int) or part.replace("_", "").isalnum()]
    names = [str(part) for part in (within, *place) if part is not None]
    path, name = ".".join(names), names[0] if names else None
    if first["type"] == "extra_forbidden":
        return bad_request(f"{path} is a field that is not served", param=name, code="unknown_field")
    if first["type"] == "missing":
        return bad_request(f"{path} is required", param=name, code="missing_required_parameter")
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":
        return bad_request(message, param=name)
    return bad_request(f"{path}: {message}, got {_shown(first['input'])}", param=name)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."

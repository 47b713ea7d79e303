"""RequestModel: the body of a request, each field of exactly its type.

A field that is not served is refused by its name. Three kinds are ignored: those that are null, those that change no
answer here, which are in HARMLESS, and those in UNLESS_ASKED that are false.

A wrong body costs no more than a right one: a list is left at its first wrong element, and objects have few fields.
"""

from typing import Any, TypeVar

import pydantic_core
from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError, model_validator

from kvpage.server.protocol.errors import ApiError, bad_request

HARMLESS = frozenset({
    "user", "metadata", "store", "service_tier", "parallel_tool_calls", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "reasoning_effort", "verbosity", "separate_reasoning", "stream_reasoning",
    "include_reasoning",
})  # fmt: skip
"""Fields of OpenAI's clients, and of routers, for bookkeeping, or that a model without them answers all the same."""

UNLESS_ASKED = frozenset({"no_stop_trim", "return_hidden_states"})
"""Fields that routers add to each request as false."""

MAX_VALUES = 2**21 + 2**16
"""Values in a body at most: each takes up to a hundred times its bytes, and is made while nothing else runs."""
MAX_FIELDS = 256
"""Fields of an object whose fields have names of ours."""
MAX_SHOWN = 80
"""Characters of a value, or of a name, in an error."""

Model = TypeVar("Model", bound="RequestModel")


def _fail_fast(schema: Any) -> None:
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            schema["fail_fast"] = True
        schema = list(schema.values())
    if isinstance(schema, list):
        for part in schema:
            _fail_fast(part)


class RequestModel(BaseModel):
    """A part of a request's body: strict types, finite numbers, no other fields."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> pydantic_core.CoreSchema:
        """Return the rules of the model, by which each list fails at its first wrong element."""
        schema = handler(source)
        _fail_fast(schema)
        return schema

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, given: Any) -> Any:
        if isinstance(given, dict) and len(given) > MAX_FIELDS:
            raise ValueError(f"an object must have at most {MAX_FIELDS} fields, got {len(given)}")
        return given


def parse_json(body: bytes) -> dict[str, Any]:
    """Return the object that a body holds. ApiError for anything else; NaN and infinity are no JSON."""
    if body.count(b",") + body.count(b"[") + body.count(b"{") > MAX_VALUES:
        raise bad_request(f"body must hold at most {MAX_VALUES} values, got more", code="too_many_values")
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
    if len(fields) > MAX_FIELDS:
        raise bad_request(f"{within or 'body'} must have at most {MAX_FIELDS} fields, got {len(fields)}", param=within)
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
    names = [str(part)[:MAX_SHOWN] for part in (within, *place) if part is not None]
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
    """Return a value as text, cut: of a long one no more than its begin is looked at."""
    if isinstance(value, list | dict):
        return f"a {type(value).__name__} of {len(value)}"
    text = repr(value[:MAX_SHOWN] if isinstance(value, str) else value)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."

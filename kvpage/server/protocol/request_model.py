"""RequestModel: the body of a request, each field of exactly its type.

A null is as if the field were not there. A field that is not served is left aside, and named to the client; a server
with strict fields refuses it. Bookkeeping, in HARMLESS, is left aside without a word.

A wrong body costs no more than a right one: a list is left at its first wrong element, and objects have few fields.
"""

import re
from collections.abc import Collection
from itertools import islice
from typing import Annotated, Any, ClassVar, TypeVar

import pydantic_core
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    GetCoreSchemaHandler,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from kvpage.server.protocol.errors import UNKNOWN_FIELD, ApiError, bad_request

HARMLESS = frozenset({
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
})  # fmt: skip
"""Bookkeeping of OpenAI's clients."""

NEVER_REFUSED = frozenset({
    "parallel_tool_calls", "verbosity", "separate_reasoning", "stream_reasoning", "include_reasoning", "no_stop_trim",
    "return_hidden_states",
})  # fmt: skip
"""Fields that routers and clients add to each request. Where they are not served, they are named as others are, and not
refused."""

REFUSED = {
    "suffix": "text is generated after the prompt only",
    "use_beam_search": "tokens are sampled one by one",
}
"""Fields whose answer would be another one without them, and why they are not served. False and "" ask for nothing."""

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


def _whole(value: object) -> object:
    """Take 4.0 for 4: some languages have one kind of number only."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Integer = Annotated[int, BeforeValidator(_whole)]


class RequestModel(BaseModel):
    """A part of a request's body: strict types, finite numbers.

    Attributes:
        called: Its field in the body, for the names of fields that are left aside; "" for the body itself.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)
    called: ClassVar[str] = ""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> pydantic_core.CoreSchema:
        """Return the rules of the model, by which each list fails at its first wrong element."""
        schema = handler(source)
        _fail_fast(schema)
        return schema

    @model_validator(mode="before")
    @classmethod
    def _asked_fields(cls, values: Any, info: ValidationInfo) -> Any:
        if not isinstance(values, dict):
            return values
        if len(values) > MAX_FIELDS:
            raise ValueError(f"an object must have at most {MAX_FIELDS} fields, got {len(values)}")
        asked = {name: value for name, value in values.items() if value is not None}
        ignored: set[str] | None = info.context
        if ignored is None or cls.model_config["extra"] == "ignore":
            return asked
        known = {field.alias or name for name, field in cls.model_fields.items()}
        others = (f"{cls.called}{name}" for name in asked if name not in known)
        ignored.update(islice(others, max(MAX_FIELDS - len(ignored), 0)))
        return {name: value for name, value in asked.items() if name in known}


def parse_json(body: bytes) -> dict[str, Any]:
    """Return the object that a body holds. ApiError for anything else; NaN and infinity are no JSON."""
    if body.count(b",") + body.count(b"[") + body.count(b"{") > MAX_VALUES:
        raise bad_request(f"body must hold at most {MAX_VALUES} values, got more", code="too_many_values")
    try:
        fields = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise bad_request(f"body must be JSON: {error}", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise bad_request(f"body must be a JSON object, got {type(fields).__name__}", code="invalid_json")
    return fields


def read_model(
    kind: type[Model], fields: dict[str, Any], within: str | None = None, ignored: set[str] | None = None
) -> Model:
    """Check the fields of a body, and return them as `kind`. ApiError with the name of the first wrong one.

    within: the field of the body that holds them; None for the body itself.
    ignored: takes the names of fields that are not served; None refuses these.
    """
    if len(fields) > MAX_FIELDS:
        raise bad_request(f"{within or 'body'} must have at most {MAX_FIELDS} fields, got {len(fields)}", param=within)
    _check_refused(fields)
    known = set(kind.model_fields)
    asked = {name: value for name, value in fields.items() if name not in HARMLESS - known}
    passed = NEVER_REFUSED - known
    if ignored is not None:
        ignored.update(passed & {name for name, value in asked.items() if value})
    asked = {name: value for name, value in asked.items() if name not in passed and name not in REFUSED}
    try:
        return kind.model_validate(asked, context=ignored)
    except ValidationError as error:
        raise _as_api_error(error, within) from None


def leave_aside(names: Collection[str], fields: dict[str, Any], ignored: set[str] | None) -> None:
    """Leave aside fields of another route's bodies, as those that no route serves. ApiError where these are refused.

    names: the fields. fields: of the body; a null is none. ignored: as of `read_model`.
    """
    asked = [name for name in names if fields.get(name) is not None]
    if asked and ignored is None:
        raise bad_request(f"{asked[0]} is a field that is not served", param=asked[0], code=UNKNOWN_FIELD)
    if ignored is not None:
        ignored.update(asked)


def _check_refused(fields: dict[str, Any]) -> None:
    for name, why in REFUSED.items():
        if fields.get(name):
            raise bad_request(f"{name} is not served: {why}", param=name, code="not_served")


def _as_api_error(error: ValidationError, within: str | None) -> ApiError:
    errors = error.errors(include_url=False, include_context=False)
    first = max(
        errors, key=lambda failure: (failure["loc"][:1] == errors[0]["loc"][:1], len(failure["loc"]))
    )  # unions: the nearest
    location = [part for part in first["loc"] if isinstance(part, int) or part.replace("_", "").isalnum()]
    names = [str(part)[:MAX_SHOWN] for part in (within, *location) if part is not None]
    path, name = ".".join(names), names[0] if names else None
    if first["type"] == "extra_forbidden":
        return bad_request(f"{path} is a field that is not served", param=name, code=UNKNOWN_FIELD)
    if first["type"] == "missing":
        return bad_request(f"{path} is required", param=name, code="missing_required_parameter")
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":
        return bad_request(message, param=name)
    return bad_request(f"{path} {_rule(message)}, got {_shown(first['input'])}", param=name)


def _rule(message: str) -> str:
    """Return a message of pydantic as a rule: "must be a valid integer"."""
    text = re.sub(r"^\w+ (should|must) ", "must ", message.replace(" after validation", ""))
    return text if text.startswith("must ") else f"must be right: {text[:1].lower()}{text[1:]}"


def _shown(value: object) -> str:
    """Return a value as text, cut: of a long one no more than its begin is looked at."""
    if isinstance(value, list | dict):
        return f"a {type(value).__name__} of {len(value)}"
    text = repr(value[:MAX_SHOWN] if isinstance(value, str) else value)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."

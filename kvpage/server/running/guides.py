"""compiled_guide: the form that an answer must have."""

from collections.abc import Callable
from dataclasses import dataclass

from kvpage.server.protocol.errors import ApiError, bad_request
from kvpage.server.protocol.sampling_fields import ResponseFormat, SamplingFields, StructuredOutputs
from kvpage.serving import AsyncEngine, Guide, SamplingParams
from kvpage.serving.loop.intake import Prompt
from kvpage.serving.loop.request import Request

ANY_JSON = "json_object"


@dataclass(frozen=True, slots=True)
class CompiledGuide:
    """A form that the engine has compiled.

    Attributes:
        guide: The form.
        holder: A request with it that is never queued. The engine does not forget the form of a request that lives.
    """

    guide: Guide
    holder: Request


def compiled_guide(engine: AsyncEngine, field: str, make: Callable[[], Guide | None]) -> CompiledGuide | None:
    """Return the form of a request's answer, which the engine has compiled; None for any form. It may take seconds.

    field: the field of the request that names it. make: makes the guide.

    ApiError: 400 for a form that cannot be compiled, 501 where the library for forms is missing.
    """
    try:
        guide = make()
        if guide is None:
            return None
        params = SamplingParams(max_tokens=1, guide=guide)
        return CompiledGuide(guide, engine.engine.prepare(Prompt([0], params), "guide"))
    except (ValueError, TypeError) as error:
        raise bad_request(f"{field} cannot be followed: {error}", param=field) from error
    except ModuleNotFoundError as error:
        raise ApiError(501, f"{field} is not served here: {error}", param=field, code="not_served") from error


def form_guide(request: SamplingFields) -> Guide | None:
    """Return the form that the fields of a request name; None for any form. ValueError or TypeError for a wrong one."""
    if request.response_format is not None:
        return _of_format(request.response_format)
    if request.structured_outputs is not None:
        return _of_structure(request.structured_outputs)
    if request.guided_json is not None:
        return Guide.json_schema(request.guided_json)
    if request.guided_regex is not None:
        return Guide.regex(request.guided_regex)
    if request.guided_choice is not None:
        return Guide.choice(request.guided_choice)
    return Guide.grammar(request.guided_grammar or "")


def _of_format(asked: ResponseFormat) -> Guide | None:
    if asked.type == "text":
        return None
    if asked.type == ANY_JSON:
        return Guide.json_object()
    if asked.json_schema is None:
        raise ValueError("json_schema is required with the type json_schema")
    return Guide.json_schema(asked.json_schema.schema_)


def _of_structure(asked: StructuredOutputs) -> Guide:
    compact = asked.disable_any_whitespace
    forms = {
        "json": None if asked.json_ is None else lambda: Guide.json_schema(asked.json_ or {}, compact=compact),
        "json_object": (lambda: Guide.json_object(compact=compact)) if asked.json_object else None,
        "regex": None if asked.regex is None else lambda: Guide.regex(asked.regex or ""),
        "choice": None if asked.choice is None else lambda: Guide.choice(asked.choice or []),
        "grammar": None if asked.grammar is None else lambda: Guide.grammar(asked.grammar or ""),
    }
    makers = [make for make in forms.values() if make is not None]
    if len(makers) != 1:
        raise ValueError(f"exactly one of {', '.join(forms)} must be given, got {len(makers)}")
    return makers[0]()

"""Bodies: JSON in, JSON out."""

import json
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from kvpage.server.protocol.errors import ApiError
from kvpage.server.protocol.request_model import RequestModel, parse_json, read_model

Model = TypeVar("Model", bound=RequestModel)


async def body_of(request: Request, kind: type[Model]) -> Model:
    """Return the body of a request, checked. ApiError: 415 for another type than JSON, 400 for a wrong field."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        message = f"the header Content-Type must be application/json, got {content_type[:80]!r}"
        raise ApiError(415, message, code="unsupported_media_type")
    return read_model(kind, parse_json(await request.body()))


def answer(content: Any, status: int = 200) -> Response:
    """Return JSON."""
    return Response(json.dumps(content, allow_nan=False), status, media_type="application/json")

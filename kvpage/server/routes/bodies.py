"""Bodies: JSON in, JSON out. A large one is read and written beside the event loop."""

import asyncio
import json
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from kvpage.server.access.request_log import record_of
from kvpage.server.answers.formats import long_list
from kvpage.server.protocol.errors import ApiError
from kvpage.server.protocol.request_model import RequestModel, parse_json, read_model
from kvpage.server.running.open_requests import Place
from kvpage.server.service import Service

Model = TypeVar("Model", bound=RequestModel)
Result = TypeVar("Result")
LARGE_BYTES = 2**16


async def body_of(request: Request, kind: type[Model], open_request: Place) -> Model:
    """Return the body of a request, checked; see `read_body`."""
    return await read_body(request, partial(read_model, kind, ignored=ignored_fields(request)), open_request)


def ignored_fields(request: Request) -> set[str] | None:
    """Return where the names of fields that are left aside go; None for a server that refuses them."""
    return None if Service.of(request).config.strict_fields else record_of(request.scope).ignored


async def read_body(request: Request, read: Callable[[dict[str, Any]], Result], open_request: Place) -> Result:
    """Return the result of `read` for the object that is a request's body.

    ApiError: 415 for another type than JSON, 400 for a wrong field, 408 for a body that does not come, 503 for one too
    many.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        message = f"the header Content-Type must be application/json, got {content_type[:80]!r}"
        raise ApiError(415, message, code="unsupported_media_type")
    seconds = Service.of(request).config.max_body_seconds
    try:
        body = await asyncio.wait_for(_bytes_of(request, open_request), seconds)
    except asyncio.TimeoutError:
        headers = {"connection": "close"}
        raise ApiError(408, f"body must be here within {seconds:g} s", code="body_too_slow", headers=headers) from None
    if len(body) < LARGE_BYTES:
        return read(parse_json(body))
    return await asyncio.to_thread(lambda: read(parse_json(body)))


async def _bytes_of(request: Request, open_request: Place) -> bytes:
    pieces = []
    async for piece in request.stream():
        open_request.take(len(piece))
        pieces.append(piece)
    return b"".join(pieces)


async def large_answer(content: Any) -> Response:
    """Return JSON of any length."""
    return await asyncio.to_thread(long_answer, content)


def long_answer(content: Any) -> Response:
    """Return JSON with lists of any length: other threads go on between their parts."""
    return Response(_written(content), media_type="application/json")


def _written(content: Any) -> str:
    if isinstance(content, dict):
        return "{" + ",".join(f"{json.dumps(name)}:{_written(value)}" for name, value in content.items()) + "}"
    if isinstance(content, list) and content and isinstance(content[0], dict):
        return f"[{','.join(map(_written, content))}]"
    return long_list(content) if isinstance(content, list) else json.dumps(content, allow_nan=False)


def answer(content: Any, status: int = 200) -> Response:
    """Return JSON."""
    return Response(json.dumps(content, allow_nan=False), status, media_type="application/json")

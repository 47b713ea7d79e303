"""create_app: the routes of a server put together.

request ─► RequestLog ─► Gate: host, key, size of the body ─► routes ─► Service: tokenizer, runner, engine
"""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from transformers import PreTrainedTokenizerBase

from kvpage.server.access.gate import Gate, error_response
from kvpage.server.access.request_log import CLIENT_GONE, RequestLog
from kvpage.server.config import ServerConfig
from kvpage.server.protocol.errors import ApiError, failed
from kvpage.server.routes import (
    chats,
    completions,
    messages,
    models,
    responses,
    sessions,
    tokens,
)
from kvpage.server.routes.operators import health, weights
from kvpage.server.routes.shown import explain, page
from kvpage.server.service import Service
from kvpage.serving import AsyncEngine

ROUTES = completions, chats, responses, messages, sessions, models, tokens, explain, health, weights, page
logger = logging.getLogger(__name__)


def create_app(engine: AsyncEngine, tokenizer: PreTrainedTokenizerBase, config: ServerConfig) -> FastAPI:
    """Make the application that serves an engine.

    Args:
        engine: The engine. It stays the caller's to close.
        tokenizer: The model's tokenizer.
        config: Names, keys and limits.

    Returns:
        The application, for any ASGI server. Its `state.service` has the parts.

    Raises:
        TypeError: An argument is of another type.
    """
    for name, value, kind in (
        ("engine", engine, AsyncEngine),
        ("tokenizer", tokenizer, PreTrainedTokenizerBase),
        ("config", config, ServerConfig),
    ):
        if not isinstance(value, kind):
            raise TypeError(f"{name} must be of type {kind.__name__}, got {type(value).__name__}")
    service = Service(engine, tokenizer, config)
    app = FastAPI(title="kvpage", docs_url=None, redoc_url=None, openapi_url=None, lifespan=_lifespan)
    app.state.service, app.state.registry = service, health.make_registry(service)
    for routes in ROUTES:
        app.include_router(routes.router)
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(ClientDisconnect, _on_client_gone)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_failure)
    app.add_middleware(Gate, config=config)
    paths = {route.path for routes in ROUTES for route in routes.router.routes if isinstance(route, Route)}
    app.add_middleware(RequestLog, counts=service.http, paths=paths, logs=config.access_log)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    try:
        yield
    finally:
        app.state.service.close()


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error, request.url.path)


async def _on_client_gone(request: Request, error: Exception) -> Response:
    """Answer a client that has gone: it went before all of its body was here."""
    return Response(status_code=CLIENT_GONE)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Answer for a path or a method that does not exist."""
    assert isinstance(error, HTTPException)
    message = {
        404: f"the path {request.url.path[:200]!r} does not exist",
        405: f"the path {request.url.path[:200]!r} does not take the method {request.method}",
    }.get(error.status_code, str(error.detail))
    return error_response(ApiError(error.status_code, message, headers=dict(error.headers or {})), request.url.path)


async def _on_failure(request: Request, error: Exception) -> Response:
    """Answer for an error of the server's own; starlette logs it."""
    return error_response(failed(), request.url.path)

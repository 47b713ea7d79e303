"""The page at /, and the events that it draws.

/               index.html                      open to all: it holds nothing of the engine
/page/NAME      its style, script and icon      the same
/kvpage/about   the model, and its inputs       needs a key, where keys are set
/kvpage/live    pictures of the cache           the same
"""

import functools
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from importlib.resources import files
from urllib.parse import unquote

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from kvpage.server.answers.responses import EventStream
from kvpage.server.page.feed import MAX_WATCHERS, Feed
from kvpage.server.protocol.errors import ApiError, busy
from kvpage.server.routes.bodies import answer
from kvpage.server.service import Service, caller_of

router = APIRouter()
TYPES = {
    "index.html": "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}
SALT_HEADER = "x-cache-salt"
SEND_TIMEOUT = 10.0  # seconds after which a client that does not read is dropped


@router.get("/")
async def index() -> Response:
    """Return the page."""
    return _file("index.html")


@router.get("/page/{name}")
async def part(name: str) -> Response:
    """Return a part of the page."""
    if name not in TYPES:
        raise ApiError(404, f"the page has no part {name[:80]!r}")
    return _file(name)


@router.get("/kvpage/about")
async def about(request: Request) -> Response:
    """Describe the model to the page."""
    service = Service.of(request)
    has_template = service.config.chat_template or getattr(service.tokenizer, "chat_template", None)
    return answer(
        {
            "model": service.config.served_model_names[0],
            "has_chat_template": bool(has_template),
            "max_model_len": service.limits.max_model_len,
            "shows_prefixes": service.runner.has_blocks,
            "block_size": service.engine.engine.manager.block_size,
            "tool_calls": service.syntax.in_words,
        }
    )


@router.get("/kvpage/live")
async def live(request: Request) -> Response:
    """Send pictures of the cache, as events, until the client goes or the server closes."""
    service = Service.of(request)
    feed = service.feed
    if feed.num_watchers >= MAX_WATCHERS:
        raise busy(f"{feed.num_watchers} watch already, which is the most", 5)
    return EventStream(_events(feed, _namespaces(request)), lambda: None, SEND_TIMEOUT)


def _file(name: str) -> Response:
    return Response(_contents(name), headers=HEADERS, media_type=TYPES[name])


@functools.cache
def _contents(name: str) -> bytes:
    return files("kvpage.server.page").joinpath("files", name).read_bytes()


def _namespaces(request: Request) -> tuple[bytes, ...]:
    """Return the namespaces of which the caller may see requests and text.

    They are the caller's own without a salt, and the one with the salt that the caller names. Other salts of the same
    key may be secrets of other users.
    """
    caller = caller_of(request)
    salt = unquote(request.headers.get(SALT_HEADER, ""))
    return tuple(dict.fromkeys((caller.namespace(None), caller.namespace(salt))))


async def _events(feed: Feed, namespaces: tuple[bytes, ...]) -> AsyncGenerator[bytes, None]:
    async with aclosing(feed.watch(namespaces)) as pictures:
        async for picture in pictures:
            yield b"data: " + json.dumps(picture, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"
    yield b"event: closed\ndata: {}\n\n"

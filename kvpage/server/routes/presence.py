"""unless_gone: work for a client that is cancelled when the client goes."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import Request

from kvpage.server.access.request_log import CLIENT_GONE
from kvpage.server.answers.responses import end_tasks, until_gone
from kvpage.server.protocol.errors import ApiError

Result = TypeVar("Result")


async def unless_gone(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of work. If the client goes before it is there, the work is cancelled, wherever it waits."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(until_gone(request.receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ApiError(CLIENT_GONE, "the client has gone", code="client_gone")
    finally:
        await end_tasks(working, leaving)

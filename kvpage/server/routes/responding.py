"""respond: a generation as an HTTP answer, whole or as a stream. It ends when its client goes."""

import asyncio
import secrets
from collections.abc import Sequence
from contextlib import ExitStack

from starlette.requests import Request
from starlette.responses import Response

from kvpage.server.answers.event_stream import EventStream, end_tasks, until_gone
from kvpage.server.protocol.chat_request import ChatRequest
from kvpage.server.routes.generation import AnyRequest, Generation
from kvpage.server.running.job import Job
from kvpage.server.running.runner import abort_all
from kvpage.server.service import Service, caller_of
from kvpage.server.text.prompt import Prompt

CLIENT_GONE = 499  # nobody reads it


async def respond(
    request: Request, body: AnyRequest, prompts: Sequence[Prompt], model: str, stack: ExitStack
) -> Response:
    """Run a request of which the prompts are known, and return its answer.

    stack: what ends with the request, such as its place; a stream takes it along.
    """
    service = Service.of(request)
    generation = Generation(service, body, model, _answer_id(request, body))
    job = await generation.job(prompts, caller_of(request))
    if body.stream:
        return _stream(service, generation, job, prompts, stack)
    return await _whole(request, generation, job, prompts)


def _stream(
    service: Service, generation: Generation, job: Job, prompts: Sequence[Prompt], stack: ExitStack
) -> Response:
    """Queue the job, so that a refusal has its own status, and return the stream of its events."""
    requests = service.runner.submit(job)
    stack.callback(abort_all, requests)
    events = generation.events(job, generation.transcripts(prompts), requests)
    return EventStream(events, stack.pop_all().close, service.config.send_timeout)


async def _whole(request: Request, generation: Generation, job: Job, prompts: Sequence[Prompt]) -> Response:
    working = asyncio.ensure_future(generation.whole(job, prompts))
    leaving = asyncio.ensure_future(until_gone(request.receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return Response(working.result(), media_type="application/json")
        return Response(status_code=CLIENT_GONE)
    finally:
        await end_tasks(working, leaving)


def _answer_id(request: Request, body: AnyRequest) -> str:
    """Return the answer's id: that of the body, of the header X-Request-Id, or a new one."""
    asked = body.request_id or request.headers.get("x-request-id", "")[:256]
    return ("chatcmpl-" if isinstance(body, ChatRequest) else "cmpl-") + (asked or secrets.token_hex(16))

"""respond: a generation as an HTTP answer, whole or as a stream. It ends when its client goes."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from kvpage.server.access.request_log import CLIENT_GONE, record_of
from kvpage.server.answers.event_stream import EventStream, end_tasks, until_gone
from kvpage.server.answers.whole_answer import WholeAnswer
from kvpage.server.protocol.chat_request import ChatRequest
from kvpage.server.protocol.errors import ApiError
from kvpage.server.routes.generation import AnyRequest, Generation
from kvpage.server.running.job import Job
from kvpage.server.running.runner import abort_all
from kvpage.server.service import Service, caller_of
from kvpage.server.text.prompt import Prompt

Result = TypeVar("Result")
MakePrompts = Callable[[], Coroutine[Any, Any, Sequence[Prompt]]]


async def respond(
    request: Request, body: AnyRequest, make_prompts: MakePrompts, model: str, stack: ExitStack
) -> Response:
    """Run a request, and return its answer. ApiError 499 once the client has gone.

    make_prompts: called once.
    stack: contexts that end with the request; the answer takes it along.
    """
    service = Service.of(request)
    generation = Generation(service, body, model, _answer_id(request, body))

    async def prepared() -> tuple[Sequence[Prompt], Job]:
        prompts = await make_prompts()
        return prompts, await generation.job(prompts, caller_of(request))

    prompts, job = await _unless_gone(request, prepared())
    if body.stream:
        return _stream(service, generation, job, prompts, stack)
    content = await _unless_gone(request, generation.whole(job, prompts))
    return WholeAnswer(content, stack.pop_all().close)


def _stream(
    service: Service, generation: Generation, job: Job, prompts: Sequence[Prompt], stack: ExitStack
) -> Response:
    """Queue the job, so that a refusal has its own status, and return the stream of its events."""
    requests = service.runner.submit(job)
    stack.callback(abort_all, requests)
    events = generation.events(job, generation.transcripts(prompts), requests)
    return EventStream(events, stack.pop_all().close, service.config.send_timeout)


async def _unless_gone(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
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


def _answer_id(request: Request, body: AnyRequest) -> str:
    """Return the answer's id: that of the body, or that of the request."""
    asked = body.request_id or record_of(request.scope).request_id
    return ("chatcmpl-" if isinstance(body, ChatRequest) else "cmpl-") + asked

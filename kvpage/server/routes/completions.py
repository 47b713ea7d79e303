"""/v1/completions and /v1/completions/render."""

import time
from contextlib import ExitStack
from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from kvpage.server.answers.formats import CompletionFormat
from kvpage.server.protocol.completion_request import CompletionRequest
from kvpage.server.routes.bodies import body_of, large_answer
from kvpage.server.routes.generation import answer_id, respond
from kvpage.server.routes.prompts import checked_model, prompts_of
from kvpage.server.service import Service

router = APIRouter()


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    """Complete prompts."""
    service = Service.of(request)
    with ExitStack() as stack:
        open_request = stack.enter_context(service.open_request())
        body = await body_of(request, CompletionRequest, open_request)
        model = checked_model(service, body)
        service.runner.check_room(body.num_prompts)
        answer_format = CompletionFormat(answer_id(request, body, "cmpl-"), int(time.time()), model)
        return await respond(request, body, answer_format, partial(prompts_of, service, body), stack)


@router.post("/v1/completions/render")
async def render(request: Request) -> Response:
    """Return the token ids of prompts, as a completion would compute them."""
    service = Service.of(request)
    with service.open_request() as open_request:
        body = await body_of(request, CompletionRequest, open_request)
        model = checked_model(service, body)
        prompts = await prompts_of(service, body)
        return await large_answer(
            [{"model": model, "prompt": prompt.text or None, "token_ids": prompt.token_ids} for prompt in prompts]
        )

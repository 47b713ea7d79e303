"""/v1/chat/completions and /v1/chat/completions/render."""

import time
from contextlib import ExitStack
from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from kvpage.server.answers.formats import ChatFormat
from kvpage.server.protocol.chat_request import ChatRequest
from kvpage.server.routes.bodies import body_of, large_answer
from kvpage.server.routes.generation import answer_id, respond
from kvpage.server.routes.prompts import chat_prompts, checked_model, prompt_of
from kvpage.server.service import Service

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    """Answer a chat."""
    service = Service.of(request)
    with ExitStack() as stack:
        open_request = stack.enter_context(service.open_request())
        body = await body_of(request, ChatRequest, open_request)
        model = checked_model(service, body)
        service.runner.check_room(body.num_prompts)

        answer_format = ChatFormat(answer_id(request, body, "chatcmpl-"), int(time.time()), model)
        return await respond(request, body, answer_format, partial(chat_prompts, service, body), stack)


@router.post("/v1/chat/completions/render")
async def render(request: Request) -> Response:
    """Return the prompt that the chat template makes, as text and as token ids."""
    service = Service.of(request)
    with service.open_request() as open_request:
        body = await body_of(request, ChatRequest, open_request)
        model = checked_model(service, body)
        prompt = await prompt_of(service, body)
        return await large_answer({"model": model, "prompt": prompt.text, "token_ids": prompt.token_ids})

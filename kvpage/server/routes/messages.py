"""/v1/messages and /v1/messages/count_tokens: chats in Anthropic's form."""

import secrets
from contextlib import ExitStack
from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from kvpage.server.answers.messages_format import MessagesFormat
from kvpage.server.protocol.errors import renamed_params
from kvpage.server.protocol.messages_request import NAMES, CountRequest, messages_chat
from kvpage.server.routes.bodies import answer, ignored_fields, read_body
from kvpage.server.routes.generation import respond
from kvpage.server.routes.prompts import chat_prompts, checked_model, prompt_of
from kvpage.server.service import Service

router = APIRouter()


@router.post("/v1/messages")
async def messages(request: Request) -> Response:
    """Answer a chat."""
    service = Service.of(request)
    with renamed_params(NAMES), ExitStack() as stack:
        open_request = stack.enter_context(service.open_request())
        body = await read_body(request, partial(messages_chat, ignored=ignored_fields(request)), open_request)
        model = checked_model(service, body)
        service.runner.check_room(body.num_prompts)

        return await respond(
            request,
            body,
            MessagesFormat(f"msg_{secrets.token_hex(12)}", model),
            partial(chat_prompts, service, body),
            stack,
        )


@router.post("/v1/messages/count_tokens")
async def count_tokens(request: Request) -> Response:
    """Count the tokens of a chat."""
    service = Service.of(request)
    with renamed_params(NAMES), service.open_request() as open_request:
        read = partial(messages_chat, ignored=ignored_fields(request), kind=CountRequest)
        body = await read_body(request, read, open_request)
        service.check_model(body.model)
        return answer({"input_tokens": len((await prompt_of(service, body)).token_ids)})

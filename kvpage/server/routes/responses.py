"""/v1/responses: chats in the form of OpenAI's Responses, and the last of them."""

import asyncio
import json
import secrets
import time
from contextlib import ExitStack
from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from kvpage.server.access.keys import Caller
from kvpage.server.answers.responses_format import ResponsesFormat
from kvpage.server.protocol.chat_request import ChatRequest
from kvpage.server.protocol.errors import CONTEXT_LENGTH, ApiError, bad_request, renamed_params
from kvpage.server.protocol.responses_request import NAMES, Asked
from kvpage.server.routes.bodies import answer, ignored_fields, read_body
from kvpage.server.routes.generation import respond, with_session_headers
from kvpage.server.routes.prompts import chat_prompts, checked_model
from kvpage.server.running.response_turns import Line, ResponseTurn
from kvpage.server.service import Service, caller_of
from kvpage.server.text.text_service import Prompt
from kvpage.serving.sessions.session import MAIN

router = APIRouter()


@router.post("/v1/responses")
async def responses(request: Request) -> Response:
    """Answer a chat."""
    service = Service.of(request)
    with renamed_params(NAMES), ExitStack() as stack:
        open_request = stack.enter_context(service.open_request())
        asked, body = await read_body(request, partial(asked_chat, ignored=ignored_fields(request)), open_request)
        tenant, previous = caller_of(request).tenant, asked.body.previous_response_id
        if body is None:
            body = await asyncio.to_thread(lambda: asked.chat(service.responses.messages(tenant, previous)))
        model = checked_model(service, body)
        service.runner.check_room(body.num_prompts)
        settings = settings_of(asked, body, model)
        check_numbers(settings)
        body = with_session_headers(request, body)
        turn = turn_of(service, caller_of(request), body, settings, stack) if asked.body.store else None

        def keep(response: dict[str, Any], message: dict[str, Any]) -> None:
            if asked.body.store:
                service.responses.keep(tenant, response, [*asked.new_messages, message], previous, turn)

        make_prompts = fitting_prompts if asked.body.truncation == "auto" else chat_prompts
        answer_format, prompts = ResponsesFormat(settings, keep), partial(make_prompts, service, body)
        return await respond(request, body, answer_format, prompts, stack, turn)


@router.get("/v1/responses/{response_id}")
async def response(request: Request, response_id: str) -> Response:
    """Return a response that is kept. ApiError 400 where it is asked for as a stream: a client would see no event."""
    if request.query_params.get("stream", "").lower() in ("true", "1"):
        raise bad_request(
            "stream must be false: a response that is kept comes whole", param="stream", code="not_served"
        )
    content = Service.of(request).responses.response(caller_of(request).tenant, response_id)
    return Response(content, media_type="application/json")


@router.delete("/v1/responses/{response_id}")
async def delete(request: Request, response_id: str) -> Response:
    """Forget a response, and the blocks that only it needs of its session."""
    service, tenant = Service.of(request), caller_of(request).tenant
    service.runner.work.leave(service.responses.forget(tenant, response_id), tenant)
    return answer({"id": response_id, "object": "response", "deleted": True})


def asked_chat(fields: dict[str, Any], ignored: set[str] | None) -> tuple[Asked, ChatRequest | None]:
    """Return a body, and the chat that it asks for; None where the messages before are needed first.

    Args:
        fields: The body.
        ignored: Takes the names of fields that are left aside; None refuses them.
    """
    asked = Asked(fields, ignored)
    return asked, asked.chat([]) if asked.body.previous_response_id is None else None


def turn_of(
    service: Service, caller: Caller, body: ChatRequest, settings: dict[str, Any], stack: ExitStack
) -> ResponseTurn | None:
    """Return of which session a response that is kept becomes a turn, until the stack ends; None for none.

    Args:
        service: The server's parts.
        caller: Who asks.
        body: The chat. A session that it names comes first.
        settings: The fields of the response.
        stack: Contexts that end with the request.
    """
    namespace, adapter = caller.namespace(body.cache_salt), service.adapter_of(body.model)
    has_turns = service.runner.has_blocks and service.responses.keeps_some
    if not has_turns or (body.session_branch is not None and body.session_id is None):
        return None
    if body.session_id is not None:
        return ResponseTurn(Line(namespace, body.session_id, body.session_branch or MAIN), adapter)
    responses, previous = service.responses, settings["previous_response_id"]
    turn = responses.begin_turn(caller.tenant, settings["id"], previous, namespace, adapter)
    stack.callback(lambda: service.runner.work.leave(responses.end_turn(settings["id"], turn), caller.tenant))
    return turn


async def fitting_prompts(service: Service, body: ChatRequest) -> list[Prompt]:
    """Return the prompt of a chat without its first turns, as few as make it fit into the model.

    Messages before the first turn and the last turn stay. ApiError 400 where they alone are too long.
    """
    starts = [index for index, message in enumerate(body.messages) if message.role == "user"]
    prompts = await _prompts_if_they_fit(service, body)
    if prompts is not None or len(starts) < 2:
        return prompts or await chat_prompts(service, body)
    fewest, most = 1, len(starts) - 1
    while fewest < most:
        middle = (fewest + most) // 2
        if await _prompts_if_they_fit(service, _shortened(body, starts, middle)) is None:
            fewest = middle + 1
        else:
            most = middle
    return await chat_prompts(service, _shortened(body, starts, fewest))


async def _prompts_if_they_fit(service: Service, body: ChatRequest) -> list[Prompt] | None:
    try:
        return await chat_prompts(service, body)
    except ApiError as error:
        if error.code != CONTEXT_LENGTH:
            raise
        return None


def _shortened(body: ChatRequest, starts: list[int], num_turns: int) -> ChatRequest:
    """Return a chat without its first turns, which begin at `starts`."""
    messages = [*body.messages[: starts[0]], *body.messages[starts[num_turns] :]]
    return body.model_copy(update={"messages": messages})


def check_numbers(settings: dict[str, Any]) -> None:
    """Raise ApiError 400 for a field with a number beyond all bounds, such as 1e999: no JSON could show it."""
    for name, value in settings.items():
        try:
            json.dumps(value, allow_nan=False)
        except ValueError:
            raise bad_request(f"{name} must hold finite numbers, got an infinite one", param=name) from None


def settings_of(asked: Asked, body: ChatRequest, model: str) -> dict[str, Any]:
    """Return the fields of a response that tell of its request.

    Args:
        asked: The request.
        body: The chat that it asks for.
        model: The model's name.
    """
    fields = asked.body
    form = None if fields.text is None else fields.text.format
    return {
        "id": f"resp_{secrets.token_hex(24)}",
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        "background": False,
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "max_tool_calls": fields.max_tool_calls,
        "metadata": fields.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": fields.previous_response_id,
        "reasoning": {"effort": body.template_arguments.get("reasoning_effort"), "summary": None},
        "store": fields.store,
        "temperature": body.temperature,
        "text": {"format": form or {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": fields.tools or [],
        "top_p": body.top_p,
        "truncation": fields.truncation,
    }

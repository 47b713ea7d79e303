"""/v1/chat/completions and /v1/chat/completions/render."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from kvpage.server.protocol.chat_request import ChatRequest
from kvpage.server.routes.bodies import answer, body_of
from kvpage.server.routes.prompts import prompt_of
from kvpage.server.routes.responding import respond
from kvpage.server.running.sampling import check_limits
from kvpage.server.service import Service

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    """Answer a chat."""
    service, body = Service.of(request), await body_of(request, ChatRequest)
    model = service.check_model(body.model)
    check_limits(body, service.config)
    return await respond(request, body, [await prompt_of(service, body)], model)


@router.post("/v1/chat/completions/render")
async def render(request: Request) -> Response:
    """Return the prompt that the chat template makes, as text and as token ids."""
    service, body = Service.of(request), await body_of(request, ChatRequest)
    model = service.check_model(body.model)
    check_limits(body, service.config)
    prompt = await prompt_of(service, body)
    return answer({"model": model, "prompt": prompt.text, "token_ids": prompt.token_ids})

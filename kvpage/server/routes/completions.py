"""/v1/completions and /v1/completions/render."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from kvpage.server.protocol.completion_request import CompletionRequest
from kvpage.server.routes.bodies import answer, body_of
from kvpage.server.routes.prompts import prompts_of
from kvpage.server.routes.responding import respond
from kvpage.server.running.sampling import check_limits
from kvpage.server.service import Service

router = APIRouter()


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    """Complete prompts."""
    service, body = Service.of(request), await body_of(request, CompletionRequest)
    model = service.check_model(body.model)
    check_limits(body, service.config)
    return await respond(request, body, await prompts_of(service, body), model)


@router.post("/v1/completions/render")
async def render(request: Request) -> Response:
    """Return the token ids of prompts, as a completion would compute them."""
    service, body = Service.of(request), await body_of(request, CompletionRequest)
    model = service.check_model(body.model)
    check_limits(body, service.config)
    prompts = await prompts_of(service, body)
    return answer(
        [{"model": model, "prompt": prompt.text or None, "token_ids": prompt.token_ids} for prompt in prompts]
    )

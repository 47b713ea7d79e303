"""/kvpage/explain: how far the cache reaches into the prompt of a request, and why not further.

The body is that of a completion or of a chat, as it would be sent. Nothing is computed, and nothing counts as used.
"""

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from kvpage.server.answers.responses import unless_gone
from kvpage.server.protocol.chat_request import ChatRequest
from kvpage.server.protocol.completion_request import AnyRequest, CompletionRequest
from kvpage.server.protocol.errors import bad_request
from kvpage.server.protocol.request_model import read_model
from kvpage.server.routes.bodies import answer, ignored_fields, read_body
from kvpage.server.routes.prompts import checked_model, prompt_of, prompts_of
from kvpage.server.service import Service, caller_of
from kvpage.server.text.text_service import Prompt

router = APIRouter()


@router.post("/kvpage/explain")
async def explain(request: Request) -> Response:
    """Explain a prompt of the caller's own namespace."""
    service = Service.of(request)
    with service.open_request() as open_request:
        ignored = ignored_fields(request)
        body = await read_body(request, lambda fields: _chat_or_prompt(fields, ignored), open_request)
        model = checked_model(service, body)
        prompt = await _only_prompt(service, body)
        service.check_ids(prompt.token_ids)
        namespace, adapter = caller_of(request).namespace(body.cache_salt), service.adapter_of(body.model)
        work = service.explainer.explain(prompt.token_ids, namespace, adapter)
        return answer({"model": model, **await unless_gone(request, work)})


def _chat_or_prompt(fields: dict[str, Any], ignored: set[str] | None) -> AnyRequest:
    if fields.get("messages") is not None:
        return read_model(ChatRequest, fields, ignored=ignored)
    return read_model(CompletionRequest, fields, ignored=ignored)


async def _only_prompt(service: Service, body: AnyRequest) -> Prompt:
    """Return the prompt. ApiError 400 for several, and where a request would compute all of it in any case."""
    if isinstance(body, ChatRequest):
        return await prompt_of(service, body)
    if len(body.prompt) > 1:
        raise bad_request(f"prompt must be a single one to be explained, got {len(body.prompt)}", param="prompt")
    if body.num_prompt_logprobs is not None:
        raise bad_request("echo with logprobs computes all of the prompt, whatever is cached", param="echo")
    [prompt] = await prompts_of(service, body)
    return prompt

"""/tokenize and /detokenize, as vLLM has them."""

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from kvpage.server.protocol.chat_request import ChatRequest
from kvpage.server.protocol.errors import ApiError
from kvpage.server.protocol.request_model import RequestModel, read_model
from kvpage.server.protocol.sampling_fields import Count
from kvpage.server.routes.bodies import answer, body_of, ignored_fields, long_answer, read_body
from kvpage.server.routes.prompts import prompt_of
from kvpage.server.service import Service

router = APIRouter()
FEW_TOKENS = 1024  # whose answer is made at once


class TokenizeText(RequestModel):
    """Text to tokens."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChat(ChatRequest):
    """A chat to tokens."""

    return_token_strs: bool = False


class DetokenizeRequest(RequestModel):
    """Tokens to text."""

    model: str | None = None
    tokens: Annotated[list[Count], Field(max_length=2**20)]


@router.post("/tokenize")
async def tokenize(request: Request) -> Response:
    """Return the tokens of a text, or of a chat."""
    service = Service.of(request)
    with service.open_request() as open_request:
        ignored = ignored_fields(request)
        body = await read_body(request, lambda fields: _text_or_chat(fields, ignored), open_request)
        service.check_model(body.model)
        if isinstance(body, TokenizeChat):
            token_ids = (await prompt_of(service, body)).token_ids
        else:
            token_ids = await service.text.encode(body.prompt, body.add_special_tokens)
        if len(token_ids) <= FEW_TOKENS:
            return _tokens(service, token_ids, body.return_token_strs)
        return await asyncio.to_thread(_tokens, service, token_ids, body.return_token_strs)


def _text_or_chat(fields: dict[str, Any], ignored: set[str] | None) -> TokenizeText | TokenizeChat:
    if fields.get("messages") is not None:
        return read_model(TokenizeChat, fields, ignored=ignored)
    return read_model(TokenizeText, fields, ignored=ignored)


def _tokens(service: Service, token_ids: list[int], shows_texts: bool) -> Response:
    fields: dict[str, Any] = {
        "count": len(token_ids),
        "max_model_len": service.engine.engine.max_model_len,
        "tokens": token_ids,
    }
    if shows_texts:
        fields["token_strs"] = [service.vocabulary[token_id][0] for token_id in token_ids]
    return long_answer(fields)


@router.post("/detokenize")
async def detokenize(request: Request) -> Response:
    """Return the text of tokens."""
    service = Service.of(request)
    with service.open_request() as open_request:
        body = await body_of(request, DetokenizeRequest, open_request)
        service.check_model(body.model)
        service.check_ids(body.tokens)
        return answer({"prompt": await service.text.decode(body.tokens)})


@router.api_route("/v1/embeddings", methods=["POST"])
async def embeddings(request: Request) -> Response:
    """Refuse: the model generates."""
    raise ApiError(404, "embeddings are not served: the model generates text", code="not_served")

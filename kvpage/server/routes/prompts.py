"""Prompts: the inputs of requests, as token ids that fit into the model."""

from kvpage.server.protocol.chat_request import ChatRequest
from kvpage.server.protocol.completion_request import AnyRequest, CompletionRequest
from kvpage.server.protocol.errors import bad_request
from kvpage.server.running.sampling import check_limits
from kvpage.server.service import Service
from kvpage.server.text.chat_template import Chat
from kvpage.server.text.text_service import Prompt, too_long


def checked_model(service: Service, body: AnyRequest) -> str:
    """Return the name of the model for the answer to a request within the server's limits. ApiError 400 or 404."""
    model = service.check_model(body.model)
    check_limits(body, service.config, service.max_num_waiting)
    return model


async def prompts_of(service: Service, body: CompletionRequest) -> list[Prompt]:
    """Return the prompts as tokens, and as text where they are echoed."""
    prompts, num_tokens = list[Prompt](), 0
    for prompt in body.prompt:
        if isinstance(prompt, str):
            is_cut = body.truncate_prompt_tokens is not None
            token_ids = await service.text.encode(prompt, body.add_special_tokens, is_cut)
            text = prompt
        else:
            token_ids, text = prompt, ""
        shown = _checked(service, body, Prompt(token_ids)).token_ids
        num_tokens += len(shown)
        _check_sum(service, body, num_tokens, len(body.prompt))
        if body.echo and (not text or len(shown) < len(token_ids)):
            service.check_ids(shown)
            text = await service.text.decode(shown)
        prompts.append(Prompt(shown, text))
    return prompts


async def prompt_of(service: Service, body: ChatRequest) -> Prompt:
    """Return the prompt that the chat template makes."""
    is_cut = body.truncate_prompt_tokens is not None
    rendered = await service.text.render(lambda: chat_of(body), body.add_special_tokens, is_cut)
    prompt = _checked(service, body, rendered)
    _check_sum(service, body, len(prompt.token_ids), 1)
    return prompt


async def chat_prompts(service: Service, body: ChatRequest) -> list[Prompt]:
    """Return the prompt of a chat, as the only one."""
    return [await prompt_of(service, body)]


def chat_of(body: ChatRequest) -> Chat:
    """Return the chat that a body asks for. ApiError 400 for a call without a function."""
    return Chat(
        [message.for_template() for message in body.messages],
        [tool.for_template() for tool in body.shown_tools] or None,
        body.add_generation_prompt,
        body.continue_final_message,
        body.template_arguments,
    )


def _checked(service: Service, body: AnyRequest, prompt: Prompt) -> Prompt:
    """Return the prompt, cut if the request says so. ApiError 400 for too many tokens."""
    most = body.truncate_prompt_tokens
    cut = prompt if most is None else prompt.cut(most)
    if len(cut.token_ids) > service.max_prompt_tokens:
        raise too_long(f"{len(cut.token_ids)} tokens", service.max_prompt_tokens)
    return cut


def _check_sum(service: Service, body: AnyRequest, num_tokens: int, num_prompts: int) -> None:
    """Raise ApiError 400 for prompts that are too long all together. num_tokens: of the prompts so far."""
    num_counted = num_tokens * (body.n if body.shows_prompt else 1)
    most = service.config.max_batch_tokens
    if num_counted > most and (num_prompts > 1 or num_counted > num_tokens):
        times = f" in each of n={body.n} samples" if body.shows_prompt and body.n > 1 else ""
        message = f"prompt must have at most {most} tokens in all{times}, got {num_counted}"
        raise bad_request(message, param="prompt", code="too_many_tokens")
    if body.num_prompt_logprobs is not None:
        num_scored = num_tokens * body.n * (1 + body.num_prompt_logprobs)
        most = service.config.max_scored_tokens
        if num_scored > most:
            message = f"logprobs must be at most {most} in all for the tokens of an echo, got {num_scored}"
            raise bad_request(message, param="logprobs", code="too_many_tokens")

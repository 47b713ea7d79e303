"""Prompts: what requests give, as token ids that fit into the model."""

from kvpage.server.protocol.chat_request import ChatRequest
from kvpage.server.protocol.completion_request import CompletionRequest
from kvpage.server.service import Service
from kvpage.server.text.chat_template import Chat
from kvpage.server.text.prompt import Prompt
from kvpage.server.text.text_service import too_long


async def prompts_of(service: Service, body: CompletionRequest) -> list[Prompt]:
    """Return the prompts as tokens, and as text where they are echoed."""
    prompts = []
    for prompt in body.prompt:
        if isinstance(prompt, str):
            is_cut = body.truncate_prompt_tokens is not None
            token_ids = await service.text.encode(prompt, body.add_special_tokens, is_cut)
            text = prompt
        else:
            token_ids, text = prompt, ""
        shown = _checked(service, body, token_ids)
        if body.echo and (not text or len(shown) < len(token_ids)):
            service.check_ids(shown)
            text = await service.text.decode(shown)
        prompts.append(Prompt(shown, text))
    return prompts


async def prompt_of(service: Service, body: ChatRequest) -> Prompt:
    """Return the prompt that the chat template makes."""
    tools = None if body.tool_choice == "none" or not body.tools else body.tools
    chat = Chat(
        [message.for_template() for message in body.messages],
        None if tools is None else [tool.model_dump(exclude_none=True) for tool in tools],
        body.add_generation_prompt,
        body.continue_final_message,
        body.chat_template_kwargs or {},
    )
    is_cut = body.truncate_prompt_tokens is not None
    text, token_ids = await service.text.render(chat, body.add_special_tokens, is_cut)
    return Prompt(_checked(service, body, token_ids), text)


def _checked(service: Service, body: CompletionRequest | ChatRequest, token_ids: list[int]) -> list[int]:
    """Return the prompt's tokens, cut if the request says so. ApiError 400 for too many."""
    most = body.truncate_prompt_tokens
    cut = token_ids if most is None else token_ids[-most:]
    if len(cut) > service.max_prompt_tokens:
        raise too_long(f"{len(cut)} tokens", service.max_prompt_tokens)
    return cut

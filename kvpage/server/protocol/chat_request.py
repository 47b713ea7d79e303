"""ChatRequest: the body of /v1/chat/completions."""

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from kvpage.server.protocol.errors import bad_request
from kvpage.server.protocol.request_model import RequestModel
from kvpage.server.protocol.sampling_fields import Count, Positive, SamplingFields

MAX_MESSAGES, MAX_TOOLS = 10_000, 1024
OWN_ARGUMENTS = frozenset({
    "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs", "processor_kwargs", "load_audio_from_video",
})  # fmt: skip
"""Arguments of a template's call that a request has other fields for, or that would change its result's type."""


class TextPart(RequestModel, extra="ignore"):
    """A part of a message's content. Only text is served."""

    type: Literal["text", "input_text", "output_text", "refusal"]
    text: str = ""
    refusal: str = ""


class Message(RequestModel, extra="ignore"):
    """One message. Fields that a template may know are passed to it."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    def for_template(self) -> dict[str, Any]:
        """Return the message as templates expect it: content as one text, arguments of calls as objects."""
        message: dict[str, Any] = {"role": self.role, "content": self._text()}
        for name in ("name", "tool_call_id", "reasoning_content"):
            if getattr(self, name) is not None:
                message[name] = getattr(self, name)
        if self.tool_calls:
            message["tool_calls"] = [_call_for_template(call) for call in self.tool_calls]
        return message

    def _text(self) -> str:
        if isinstance(self.content, list):
            return "\n".join(part.text or part.refusal for part in self.content)
        return self.content or ""


def _call_for_template(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad_request("messages: tool_calls must have a function with a name", param="messages")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments else {}
        except (ValueError, RecursionError):
            raise bad_request("messages: arguments of tool_calls must be JSON", param="messages") from None
    return {**call, "function": {**function, "arguments": arguments}}


class Function(RequestModel):
    """A function that the model may call."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(RequestModel):
    """A tool that the template shows to the model."""

    type: Literal["function"]
    function: Function


class ChatRequest(SamplingFields):
    """A chat."""

    logprobs_field: ClassVar[str] = "top_logprobs"
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Positive | None = None
    logprobs: bool = False
    top_logprobs: Count | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Any = None
    modalities: list[Literal["text"]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False

    @property
    def num_logprobs(self) -> int | None:
        """How many likeliest tokens are shown beside each; None for no log-probabilities at all."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def most_tokens(self, num_left: int) -> int:
        """Return how many tokens are generated at most."""
        asked = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return num_left if asked is None else asked

    @model_validator(mode="after")
    def _fields_agree(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request("top_logprobs needs logprobs=true", param="top_logprobs")
        if self.tool_choice not in (None, "none", "auto"):
            reason = "kvpage does not make the model call a tool"
            raise bad_request(f'tool_choice must be "none" or "auto": {reason}', param="tool_choice")
        if self.tool_choice == "auto" and not self.tools:
            raise bad_request("tool_choice needs tools", param="tool_choice")
        if (
            self.continue_final_message
            and self.add_generation_prompt
            and "add_generation_prompt" in self.model_fields_set
        ):
            raise bad_request("continue_final_message excludes add_generation_prompt", param="continue_final_message")
        if own := OWN_ARGUMENTS & set(self.chat_template_kwargs or {}):
            raise bad_request(f"chat_template_kwargs must not name {min(own)}", param="chat_template_kwargs")
        return self

"""ChatRequest: the body of /v1/chat/completions."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from kvpage.server.protocol.errors import bad_request
from kvpage.server.protocol.messages import Message
from kvpage.server.protocol.sampling_fields import Count, MaxTokens, SamplingFields, within
from kvpage.server.protocol.tools import NONE, Tool, ToolChoice

MAX_MESSAGES, MAX_TOOLS = 10_000, 1024
OWN_ARGUMENTS = frozenset({
    "conversation", "conversations", "messages", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs", "processor_kwargs", "load_audio_from_video",
})  # fmt: skip
"""Arguments of a template's call that a request has other fields for, or that would change its result's type."""


class ChatRequest(SamplingFields):
    """A chat."""

    logprobs_field: ClassVar[str] = "top_logprobs"
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool = False
    top_logprobs: Count | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    separate_reasoning: bool = True
    include_reasoning: bool = True
    modalities: list[Literal["text"]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    thinking: dict[str, Any] | bool | None = None
    reasoning: dict[str, Any] | None = None
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
        return within(asked, num_left)

    @property
    def choice(self) -> ToolChoice:
        """Whether the model calls tools. ApiError 400 for a choice that is none."""
        return ToolChoice.of(self.tool_choice, self.tools or ())

    @property
    def shown_tools(self) -> list[Tool]:
        """The tools that the template shows: all, unless none may be called."""
        return [] if self.choice.mode == NONE else self.tools or []

    @property
    def callable_tools(self) -> list[Tool]:
        """The tools that may be called."""
        names = self.choice.names
        return [tool for tool in self.shown_tools if names is None or tool.function.name in names]

    @property
    def template_arguments(self) -> dict[str, Any]:
        """The arguments of the template, by the names that templates have for them; the client's own come first."""
        reasoning, thinks = self.reasoning or {}, self.enable_thinking
        effort = self.reasoning_effort or reasoning.get("effort")
        if thinks is None:
            thinks = reasoning.get("enabled")
        if thinks is None and self.thinking is not None:
            thinks = self.thinking if isinstance(self.thinking, bool) else self.thinking.get("type") != "disabled"
        arguments = {} if effort is None else {"reasoning_effort": effort}
        if thinks is not None:
            arguments |= {"enable_thinking": thinks, "thinking": thinks}
        return arguments | (self.chat_template_kwargs or {})

    @model_validator(mode="after")
    def _fields_agree(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            raise bad_request("top_logprobs needs logprobs=true", param="top_logprobs")
        if self.max_completion_tokens == 0:
            raise bad_request("max_completion_tokens must be at least 1, got 0", param="max_completion_tokens")
        self.choice  # noqa: B018 - raises for a choice that is none
        if (
            self.continue_final_message
            and self.add_generation_prompt
            and "add_generation_prompt" in self.model_fields_set
        ):
            raise bad_request("continue_final_message excludes add_generation_prompt", param="continue_final_message")
        if reserved := OWN_ARGUMENTS & set(self.chat_template_kwargs or {}):
            raise bad_request(f"chat_template_kwargs must not name {min(reserved)}", param="chat_template_kwargs")
        return self

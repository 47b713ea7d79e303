"""messages_chat: the body of /v1/messages, in Anthropic's form, as the chat that it asks for.

    system        a system message
    tool_use      a call of a tool
    tool_result   a message of the role tool
    thinking      thoughts of an earlier answer

Fields that chats have beyond Anthropic's are those of /v1/chat/completions.
"""

from typing import Annotated, Any

from pydantic import Field

from kvpage.server.protocol.chat_request import MAX_MESSAGES, MAX_TOOLS, ChatRequest
from kvpage.server.protocol.errors import bad_request
from kvpage.server.protocol.request_model import RequestModel, leave_aside, read_model
from kvpage.server.protocol.sampling_fields import Positive

Block = dict[str, Any]
NAMES = {"max_completion_tokens": "max_tokens", "response_format": "output_config", "stop": "stop_sequences"}
"""The names of fields of chats here, for errors."""
LEFT_OUT = ("max_completion_tokens", "response_format", "stream_options", "stop")
"""Fields of chats that a message has other fields for."""
NEEDLESS = ("n", "cache_control")
"""A field with one value, and marks of a cache that needs none here."""
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
TEXT, THINKING, TOOL_USE, TOOL_RESULT = "text", "thinking", "tool_use", "tool_result"
REDACTED = "redacted_thinking"


class OutputConfig(RequestModel, extra="ignore"):
    """The form of the answer, and how much the model thinks."""

    effort: str | None = None
    format: Block | None = None


class MessagesRequest(RequestModel):
    """The fields that chats have not, or have in another form."""

    messages: Annotated[list[Block], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Positive
    system: str | list[Block] | None = None
    stop_sequences: list[str] | None = None
    tools: Annotated[list[Block], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Block | None = None
    output_config: OutputConfig | None = None


class CountRequest(MessagesRequest):
    """The same, whose tokens are counted."""

    max_tokens: Positive = 1


def messages_chat(
    fields: dict[str, Any], ignored: set[str] | None, kind: type[MessagesRequest] = MessagesRequest
) -> ChatRequest:
    """Return the chat that a body asks for.

    Args:
        fields: The body.
        ignored: Takes the names of fields that are left aside; None refuses them.
        kind: The fields that it must have.

    Returns:
        The chat. It ends within the last message, if that is the model's.

    Raises:
        ApiError: 400 for a field that is wrong.
    """
    known = set(kind.model_fields)
    body = read_model(kind, {name: value for name, value in fields.items() if name in known})
    leave_aside(LEFT_OUT, fields, ignored)
    if fields.get("n") not in (None, 1):
        raise bad_request("n must be 1: a message has one answer", param="n")
    left_out = known.union(LEFT_OUT, NEEDLESS)
    messages = [] if body.system is None else [{"role": "system", "content": body.system}]
    for message in body.messages:
        messages += _messages(message)
    last, choice, config = messages[-1], body.tool_choice or {}, body.output_config
    chat = {
        **{name: value for name, value in fields.items() if name not in left_out},
        "messages": messages,
        "max_completion_tokens": body.max_tokens,
        "stop": body.stop_sequences,
        "tools": None if body.tools is None else [_tool(tool) for tool in body.tools],
        "tool_choice": _choice(body.tool_choice),
        "parallel_tool_calls": not choice.get("disable_parallel_tool_use", False),
        "stream_options": {"include_usage": True},
    }
    if last["role"] == "assistant" and last.get("content") and "tool_calls" not in last:
        chat["continue_final_message"] = True
    if config is not None:
        chat |= {"response_format": _form(config.format), "reasoning_effort": config.effort}
    return read_model(ChatRequest, chat, ignored=ignored)


def _messages(message: Block) -> list[Block]:
    """Return a message as those of chats: results of tools come each as its own, before other text."""
    content = message.get("content")
    if not isinstance(content, list):
        return [{"role": message.get("role"), "content": content}]
    texts, calls, thoughts, results = list[Block](), list[Block](), list[str](), list[Block]()
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == TEXT:
            texts.append({"type": TEXT, "text": block.get("text")})
        elif kind == TOOL_USE:
            function = {"name": block.get("name"), "arguments": block.get("input")}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == TOOL_RESULT:
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": block.get("content")})
        elif kind == THINKING:
            thoughts.append(str(block.get("thinking", "")))
        elif kind != REDACTED:
            message_text = f"messages: content of the type {str(kind)[:40]!r} is not served"
            raise bad_request(message_text, param="messages", code="not_served")
    if results and not texts and not calls:
        return results
    turn: Block = {"role": message.get("role"), "content": texts or None}
    if thoughts:
        turn["reasoning_content"] = "\n".join(thoughts)
    return [*results, {**turn, "tool_calls": calls} if calls else turn]


def _tool(tool: Block) -> Block:
    if tool.get("type") not in (None, "custom"):
        raise bad_request(
            f"tools of the type {str(tool['type'])[:40]!r} are not served", param="tools", code="not_served"
        )
    function = {"name": tool.get("name"), "description": tool.get("description"), "strict": tool.get("strict"),
                "parameters": tool.get("input_schema")}  # fmt: skip
    return {"type": "function", "function": function}


def _choice(choice: Block | None) -> Any:
    if choice is None:
        return None
    if choice.get("type") == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return CHOICES.get(str(choice.get("type")), choice)


def _form(form: Block | None) -> Block | None:
    if form is None:
        return None
    return {"type": form.get("type"), "json_schema": {"schema": form.get("schema")}}

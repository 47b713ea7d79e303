"""ResponsesRequest: the body of /v1/responses, and the chat that it asks for.

    instructions          a system message
    the earlier response  its messages
    input                 items: messages, calls with their results, thoughts

Fields that chats have beyond OpenAI's are those of /v1/chat/completions.
"""

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from kvpage.server.protocol.chat_request import MAX_MESSAGES, MAX_TOOLS, ChatRequest
from kvpage.server.protocol.errors import ApiError, bad_request
from kvpage.server.protocol.request_model import RequestModel, leave_aside, read_model
from kvpage.server.protocol.sampling_fields import Count, MaxTokens

SYSTEM = "system"
NOT_SERVED = {
    "conversation": "responses are linked by previous_response_id",
    "prompt": "there are no stored prompts",
    "background": "a response is there when it is answered",
    "logprobs": "log-probabilities are those of /v1/chat/completions",
    "top_logprobs": "log-probabilities are those of /v1/chat/completions",
}
LEFT_OUT = ("messages", "max_tokens", "max_completion_tokens", "response_format")
"""Fields of chats that a response has other fields for."""
NAMES = {
    "messages": "input", "max_completion_tokens": "max_output_tokens", "response_format": "text",
}  # fmt: skip
"""The names of fields of chats here, for errors."""
Item = dict[str, Any]


class TextForm(RequestModel, extra="ignore"):
    """The form of the text."""

    format: dict[str, Any] | None = None


class ResponsesRequest(RequestModel):
    """The fields that chats have not, or have in another form."""

    input: str | Annotated[list[Item], Field(max_length=MAX_MESSAGES)] = ""
    instructions: str | list[Item] | None = None
    previous_response_id: Annotated[str, Field(max_length=256)] | None = None
    max_output_tokens: MaxTokens | None = None
    tools: Annotated[list[Item], Field(max_length=MAX_TOOLS)] | None = None
    text: TextForm | None = None
    include: list[str] = []
    max_tool_calls: Count | None = None
    truncation: Literal["auto", "disabled"] = "disabled"
    store: bool = True
    metadata: dict[str, Any] | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None


class Asked:
    """One body of /v1/responses.

    Args:
        fields: The body.
        ignored: Takes the names of fields that are left aside; None refuses them.

    Attributes:
        body: Its own fields.
        new_messages: The messages of its input.

    Raises:
        ApiError: 400 for a field that is wrong, or whose answer would be another.
    """

    def __init__(self, fields: dict[str, Any], ignored: set[str] | None) -> None:
        for name, why in NOT_SERVED.items():
            if fields.get(name):
                raise bad_request(f"{name} is not served: {why}", param=name, code="not_served")
        known = set(ResponsesRequest.model_fields)
        self.body = read_model(ResponsesRequest, {name: value for name, value in fields.items() if name in known})
        self._ignored, left_out = ignored, known | set(LEFT_OUT) | set(NOT_SERVED) | {"n"}
        leave_aside(LEFT_OUT, fields, ignored)
        if fields.get("n") not in (None, 1):
            raise bad_request("n must be 1: a response has one answer", param="n")
        if "input" not in fields and self.body.previous_response_id is None:
            raise bad_request("input is required", param="input", code="missing_required_parameter")
        self._shared = {name: value for name, value in fields.items() if name not in left_out}
        items = [{"role": "user", "content": self.body.input}] if isinstance(self.body.input, str) else self.body.input
        self.new_messages = messages_of(items)
        self._items = items

    def chat(self, earlier: Sequence[Item]) -> ChatRequest:
        """Return the chat. earlier: the messages of the responses before."""
        body = self.body
        instructions = body.instructions or []
        first = [{"role": SYSTEM, "content": instructions}] if isinstance(instructions, str) else instructions
        opening = messages_of(first)
        fields = {
            **self._shared,
            "messages": [*opening, *earlier, *self.new_messages],
            "max_completion_tokens": body.max_output_tokens,
            "tools": None if body.tools is None else [_tool(tool) for tool in body.tools],
            "response_format": None if body.text is None else _form(body.text.format),
            "stream": body.stream,
            "stream_options": {"include_usage": True},
        }
        try:
            return read_model(ChatRequest, fields, ignored=self._ignored)
        except ApiError as error:
            raise self._named(error, len(opening), len(earlier)) from None

    def _named(self, error: ApiError, num_opening: int, num_earlier: int) -> ApiError:
        """Return the error of a message with the client's own item, since others stand before it in the chat."""
        match = re.match(r"messages\.(\d+)", error.message)
        if match is None:
            return error
        name, param, index = match[0], error.param, int(match[1]) - num_opening - num_earlier
        if index >= 0:
            name = f"messages.{first_items(self._items)[index]}"
        elif int(match[1]) < num_opening:
            name = param = "instructions"
        message = f"{name}{error.message[match.end() :]}"
        return ApiError(error.status, message, param=param, code=error.code, headers=error.headers)


def first_items(items: Sequence[Item]) -> list[int]:
    """Return the place of the first item of each message that `messages_of` makes."""
    messages, places = list[Item](), list[int]()
    for index, item in enumerate(items):
        _add_item(messages, item)
        places += [index] * (len(messages) - len(places))
    return places


def messages_of(items: Sequence[Item]) -> list[Item]:
    """Return the messages that items of input are. What the model said in one turn becomes one message.

    items: as in `input`.

    Raises ApiError 400 for an item of a type that is not served.
    """
    messages = list[Item]()
    for item in items:
        _add_item(messages, item)
    return messages


def _add_item(messages: list[Item], item: Item) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        _add_message(messages, item)
    elif kind == "function_call":
        call = {"id": item.get("call_id") or item.get("id"), "type": "function",
                "function": {"name": item.get("name"), "arguments": item.get("arguments")}}  # fmt: skip
        _turn(messages).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        output = item.get("output")
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
    elif kind == "reasoning":
        if thought := _thought(item):
            _turn(messages, begins=True)["reasoning_content"] = thought
    else:
        raise bad_request(f"input: items of the type {str(kind)[:40]!r} are not served", param="input")


def _add_message(messages: list[Item], item: Item) -> None:
    message = {"role": item.get("role"), "content": item.get("content")}
    last = messages[-1] if messages else {}
    is_same_turn = last.get("role") == "assistant" and last.get("content") is None and "tool_calls" not in last
    if message["role"] == "assistant" and is_same_turn:
        last["content"] = message["content"]  # after thoughts
    else:
        messages.append(message)


def _turn(messages: list[Item], begins: bool = False) -> Item:
    """Return the message of the model's turn, a new one if none is open. begins: whether it must hold nothing yet."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or begins:
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _thought(item: Item) -> str:
    parts = item.get("content") or item.get("summary") or []
    texts = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    return "\n".join(text for text in texts if isinstance(text, str))


def _tool(tool: Item) -> Item:
    if tool.get("type", "function") != "function":
        raise bad_request(
            f"tools of the type {str(tool['type'])[:40]!r} are not served", param="tools", code="not_served"
        )
    if "function" in tool:
        return tool
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in names if name in tool}}


def _form(form: Item | None) -> Item | None:
    if form is None or form.get("type") != "json_schema":
        return form
    names = ("name", "description", "schema", "strict")
    return {"type": "json_schema", "json_schema": {name: form[name] for name in names if name in form}}

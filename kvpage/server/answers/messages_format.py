"""MessagesFormat: answers of /v1/messages, in Anthropic's form, as one message or as events.

thoughts  ─► a block "thinking"    thinking_delta
content   ─► a block "text"        text_delta
calls     ─► blocks "tool_use"     input_json_delta
"""

import json
from typing import Any

import pydantic_core

from kvpage.server.answers.calls.said import CallPart
from kvpage.server.answers.formats import AnswerFormat, Piece, Usage
from kvpage.server.protocol.errors import ApiError

ENCODE = json.JSONEncoder(separators=(",", ":")).encode
Fields = dict[str, Any]
THINKING, TEXT, TOOL_USE = "thinking", "text", "tool_use"
DELTAS = {
    THINKING: ("thinking_delta", "thinking"),
    TEXT: ("text_delta", "text"),
    TOOL_USE: ("input_json_delta", "partial_json"),
}
REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesFormat(AnswerFormat):
    """The answer to one request.

    Args:
        answer_id: The message's id.
        model: The model's name.
    """

    done = b""

    def __init__(self, answer_id: str, model: str) -> None:
        self._head = {"id": answer_id, "type": "message", "role": "assistant", "model": model}
        self._blocks = list[Fields]()
        self._kind: str | None = None  # of the open block, the last one
        self._text = ""  # of it
        self._stop: Fields = {"stop_reason": None, "stop_sequence": None}

    def whole(self, pieces: list[Piece], usage: Usage) -> bytes:
        """Return the message."""
        self._take(pieces[0])
        self._close()
        return ENCODE(self._message(usage)).encode()

    def begin(self, num_choices: int, ending: str, usage: Usage) -> bytes:
        """Return the event that names the message."""
        return _event("message_start", message=self._message(usage)).encode()

    def chunk(self, piece: Piece, ending: str) -> str:
        """Return the events of a piece."""
        return self._take(piece)

    def last(self, usage: Usage) -> bytes:
        """Return the last events."""
        delta = _event("message_delta", delta=self._stop, usage=usage_fields(usage))
        return (self._close() + delta + _event("message_stop")).encode()

    def failure(self, error: ApiError) -> bytes:
        """Return the event of an error within a stream."""
        return b"event: error\ndata: " + error.message_body() + b"\n\n"

    def _take(self, piece: Piece) -> str:
        events = self._grow(THINKING, piece.reasoning) if piece.reasoning else ""
        if piece.text:
            events += self._grow(TEXT, piece.text)
        for call in piece.calls:
            if call.name is not None:
                events += self._close() + self._open(TOOL_USE, call)
            events += self._add(call.arguments) if call.arguments else ""
        if piece.finish_reason is not None:
            is_string = isinstance(piece.stop_reason, str)
            reason = "stop_sequence" if is_string else REASONS.get(piece.finish_reason, piece.finish_reason)
            self._stop = {"stop_reason": reason, "stop_sequence": piece.stop_reason if is_string else None}
        return events

    def _grow(self, kind: str, text: str) -> str:
        begin = "" if self._kind == kind else self._close() + self._open(kind)
        return begin + self._add(text)

    def _open(self, kind: str, call: CallPart | None = None) -> str:
        if call is not None:
            block: Fields = {"type": kind, "id": call.call_id, "name": call.name, "input": {}}
        else:
            block = {"type": kind, kind: ""} | ({"signature": ""} if kind == THINKING else {})
        self._blocks.append(block)
        self._kind, self._text = kind, ""
        return _event("content_block_start", index=len(self._blocks) - 1, content_block=block)

    def _add(self, text: str) -> str:
        self._text += text
        kind, name = DELTAS[self._kind or TEXT]
        return _event("content_block_delta", index=len(self._blocks) - 1, delta={"type": kind, name: text})

    def _close(self) -> str:
        """End the open block; return its event."""
        kind, self._kind = self._kind, None
        if kind is None:
            return ""
        name, value = ("input", input_of(self._text)) if kind == TOOL_USE else (kind, self._text)
        self._blocks[-1] = {**self._blocks[-1], name: value}
        return _event("content_block_stop", index=len(self._blocks) - 1)

    def _message(self, usage: Usage) -> Fields:
        return {**self._head, "content": self._blocks, **self._stop, "usage": usage_fields(usage)}


def input_of(arguments: str) -> Fields:
    """Return the arguments of a call as an object; those that are none, such as cut ones, within one.

    Args:
        arguments: As the model has written them.
    """
    try:
        value = pydantic_core.from_json(arguments or "{}")
        json.dumps(value, allow_nan=False)  # raises for numbers that are none in JSON
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"arguments": arguments}


def usage_fields(usage: Usage) -> Fields:
    """Return the tokens of a message; those from the cache are counted by themselves.

    Args:
        usage: The tokens.
    """
    num_cached = usage.cached_tokens or 0
    return {
        "input_tokens": usage.prompt_tokens - num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": usage.completion_tokens,
    }


def _event(name: str, /, **fields: Any) -> str:
    return f"event: {name}\ndata: {ENCODE({'type': name, **fields})}\n\n"

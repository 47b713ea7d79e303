"""ResponsesFormat: answers of /v1/responses, as one object or as events.

thoughts  ─► an item "reasoning"        response.reasoning_text.delta
content   ─► an item "message"          response.output_text.delta
calls     ─► items "function_call"      response.function_call_arguments.delta
"""

import json
import secrets
from collections.abc import Callable
from typing import Any

from kvpage.server.answers.calls.said import CallPart
from kvpage.server.answers.formats import AnswerFormat, Piece, Usage
from kvpage.server.protocol.errors import ApiError

ENCODE = json.JSONEncoder(separators=(",", ":")).encode
Fields = dict[str, Any]
COMPLETED, INCOMPLETE, FAILED = "completed", "incomplete", "failed"


class OpenItem:
    """An item of the output that grows.

    Args:
        kind: "reasoning", "message" or "function_call".
        index: Its place in the output.
        call: The call's begin, for a function call.

    Attributes:
        text: Its text or arguments so far.
    """

    def __init__(self, kind: str, index: int, call: CallPart | None = None) -> None:
        self.kind, self.index, self.call, self.text = kind, index, call, ""
        prefix = {"reasoning": "rs", "message": "msg", "function_call": "fc"}[kind]
        self.item_id = f"{prefix}_{secrets.token_hex(16)}"

    @property
    def event(self) -> str:
        """The name of the events of its text."""
        names = {"reasoning": "reasoning_text", "message": "output_text", "function_call": "function_call_arguments"}
        return f"response.{names[self.kind]}"

    @property
    def part(self) -> Fields | None:
        """Its part of content; None for a call."""
        if self.kind == "message":
            return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": []}
        return {"type": "reasoning_text", "text": self.text} if self.kind == "reasoning" else None

    def fields(self, status: str) -> Fields:
        """Return it as JSON's fields."""
        shared: Fields = {"id": self.item_id, "type": self.kind, "status": status}
        if self.call is not None:
            return {**shared, "call_id": self.call.call_id, "name": self.call.name, "arguments": self.text}
        content = [self.part] if status != "in_progress" else []
        if self.kind == "reasoning":
            return {**shared, "summary": [], "content": content}
        return {**shared, "role": "assistant", "content": content}


class ResponsesFormat(AnswerFormat):
    """The answer to one request.

    Args:
        settings: The fields of the response that tell of the request.
        keep: Takes the response, and the message of the model for later turns.
    """

    done = b""

    def __init__(self, settings: Fields, keep: Callable[[Fields, Fields], None]) -> None:
        self._settings, self._keep = settings, keep
        self._output = list[Fields]()
        self._message: Fields = {"role": "assistant", "content": None}
        self._open: OpenItem | None = None
        self._num_events, self._status, self._reason = 0, "in_progress", ""

    def whole(self, pieces: list[Piece], usage: Usage) -> bytes:
        """Return the response."""
        self._take(pieces[0])
        self._close_item()
        return ENCODE(self._end(usage)).encode()

    def begin(self, num_choices: int, ending: str, usage: Usage) -> bytes:
        """Return the events that name the response."""
        response = self._response(None)
        events = [self._event(name, response=response) for name in ("response.created", "response.in_progress")]
        return "".join(events).encode()

    def chunk(self, piece: Piece, ending: str) -> str:
        """Return the events of a piece."""
        return self._take(piece)

    def last(self, usage: Usage) -> bytes:
        """Return the last events: the response as a whole."""
        closing = self._close_item()
        return (closing + self._event(f"response.{self._status}", response=self._end(usage))).encode()

    def failure(self, error: ApiError) -> bytes:
        """Return the events of an error within a stream."""
        fields = {"code": error.code, "message": error.message, "param": error.param}
        event = self._event("error", **fields)
        self._status = FAILED
        failed = {"code": "server_error", "message": error.message}
        response = {**self._response(None), "error": failed}
        return (event + self._event("response.failed", response=response)).encode()

    # --- items -------------------------------------------------------------------------------------------------------

    def _take(self, piece: Piece) -> str:
        """Take a piece; return its events."""
        events = self._grow("reasoning", piece.reasoning) if piece.reasoning else ""
        if piece.text:
            events += self._grow("message", piece.text)
        for call in piece.calls:
            if call.name is not None:
                events += self._close_item() + self._open_item("function_call", call)
            events += self._add_text(call.arguments)
        if piece.finish_reason is not None:
            self._status = INCOMPLETE if piece.finish_reason == "length" else COMPLETED
        return events

    def _grow(self, kind: str, text: str) -> str:
        is_open = self._open is not None and self._open.kind == kind
        begin = "" if is_open else self._close_item() + self._open_item(kind)
        return begin + self._add_text(text)

    def _open_item(self, kind: str, call: CallPart | None = None) -> str:
        item = self._open = OpenItem(kind, len(self._output), call)
        events = self._event("response.output_item.added", output_index=item.index, item=item.fields("in_progress"))
        if item.part is None:
            return events
        return events + self._event("response.content_part.added", **self._place(item), part=item.part)

    def _add_text(self, text: str) -> str:
        item = self._open
        if item is None or not text:
            return ""
        item.text += text
        more: Fields = {"logprobs": []} if item.kind == "message" else {}
        return self._event(f"{item.event}.delta", **self._place(item), delta=text, **more)

    def _close_item(self) -> str:
        """End the open item; return its events."""
        item, self._open = self._open, None
        if item is None:
            return ""
        self._remember(item)
        fields = item.fields(INCOMPLETE if self._status == INCOMPLETE else COMPLETED)
        self._output.append(fields)
        where = self._place(item)
        if item.call is not None:
            named = {"name": item.call.name, "arguments": item.text}
            events = self._event(f"{item.event}.done", **where, **named)
        else:
            more: Fields = {"logprobs": []} if item.kind == "message" else {}
            events = self._event(f"{item.event}.done", **where, text=item.text, **more)
            events += self._event("response.content_part.done", **where, part=item.part)
        return events + self._event("response.output_item.done", output_index=item.index, item=fields)

    def _remember(self, item: OpenItem) -> None:
        """Note an item in the message for later turns."""
        message = self._message
        if item.call is not None:
            function = {"name": item.call.name, "arguments": item.text}
            call = {"id": item.call.call_id, "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)
        elif item.kind == "message":
            message["content"] = (message["content"] or "") + item.text
        else:
            message["reasoning_content"] = message.get("reasoning_content", "") + item.text

    @staticmethod
    def _place(item: OpenItem) -> Fields:
        where: Fields = {"item_id": item.item_id, "output_index": item.index}
        return where if item.call is not None else {**where, "content_index": 0}

    # --- the response ------------------------------------------------------------------------------------------------

    def _end(self, usage: Usage) -> Fields:
        response = self._response(usage)
        self._keep(response, self._message)
        return response

    def _response(self, usage: Usage | None) -> Fields:
        incomplete = {"reason": "max_output_tokens"} if self._status == INCOMPLETE else None
        return {
            **self._settings,
            "status": self._status,
            "error": None,
            "incomplete_details": incomplete,
            "output": list(self._output),
            "usage": None if usage is None else usage_fields(usage),
        }

    def _event(self, name: str, /, **fields: Any) -> str:
        number, self._num_events = self._num_events, self._num_events + 1
        return f"event: {name}\ndata: {ENCODE({'type': name, **fields, 'sequence_number': number})}\n\n"


def usage_fields(usage: Usage) -> Fields:
    """Return the tokens of a response. Those of thoughts, and those written to the cache, have no count of their own.

    Args:
        usage: The tokens.
    """
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens or 0, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }

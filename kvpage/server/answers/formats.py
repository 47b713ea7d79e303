"""ChatFormat and CompletionFormat: choices as the JSON of a whole answer, and of the chunks of a stream.

A stream has a chunk for each token, so chunks are put together from texts: only the new text is encoded. All is ASCII,
since readers of lines disagree about the end of a line.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from json.encoder import encode_basestring_ascii as quoted
from typing import Any, NamedTuple

from kvpage.server.answers.calls.said import CallPart
from kvpage.server.protocol.errors import ApiError

PART = 1024  # elements
ENCODE = json.JSONEncoder(separators=(",", ":")).encode


DONE = b"data: [DONE]\n\n"


def long_list(values: Iterable[Any]) -> str:
    """Return values as a JSON list without spaces.

    Args:
        values: The values, which may be made one by one.
    """
    iterator, parts = iter(values), list[str]()
    while part := list(islice(iterator, PART)):
        parts.append(ENCODE(part)[1:-1])
    return f"[{','.join(parts)}]"


@dataclass(slots=True)
class Usage:
    """The tokens of one HTTP request, all its prompts and samples together.

    Attributes:
        prompt_tokens: Tokens of the prompts.
        completion_tokens: Tokens that were generated.
        cached_tokens: Tokens of the prompts whose K and V were in the cache; None until it is known.
    """

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int | None = None

    def found(self, num_tokens: int) -> None:
        """Note that num_tokens tokens of one more prompt were in the cache."""
        self.cached_tokens = (self.cached_tokens or 0) + num_tokens

    def generated(self, num_tokens: int) -> None:
        """Note how many tokens were generated so far."""
        self.completion_tokens = num_tokens

    def json(self) -> str:
        """Return it as JSON."""
        known = "null" if self.cached_tokens is None else f'{{"cached_tokens":{self.cached_tokens}}}'
        return (
            f'{{"prompt_tokens":{self.prompt_tokens},"completion_tokens":{self.completion_tokens},'
            f'"total_tokens":{self.prompt_tokens + self.completion_tokens},"prompt_tokens_details":{known}}}'
        )


class Piece(NamedTuple):
    """The next part of a choice, or all of it.

    choice_index: of the choice. text: its text. logprobs: as JSON. token_ids: the tokens, where they are asked for.
    finish_reason: set with the last piece. stop_reason: as in Sample. reasoning: thoughts. calls: of tools, or parts of
    them.
    """

    choice_index: int
    text: str
    logprobs: str = "null"
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt_token_ids: list[int] | None = None
    reasoning: str = ""
    calls: Sequence[CallPart] = ()


class AnswerFormat:
    """How an answer is written: as a whole, and as the events of a stream.

    done: the last event of each stream.
    """

    done = DONE

    def whole(self, pieces: list[Piece], usage: Usage) -> bytes:
        """Return the whole answer. pieces: one a choice."""
        raise NotImplementedError

    def begin(self, num_choices: int, ending: str, usage: Usage) -> bytes:
        """Return the beginning of a stream. ending: as of `chunk`."""
        return b""

    def chunk(self, piece: Piece, ending: str) -> str:
        """Return the events of a piece. ending: a field with a comma before it, or nothing."""
        raise NotImplementedError

    def last(self, usage: Usage) -> bytes:
        """Return the events after all pieces, where the usage is asked for."""
        raise NotImplementedError

    def failure(self, error: ApiError) -> bytes:
        """Return the event of an error within a stream."""
        return b"data: " + error.body() + b"\n\n"


class ChoicesFormat(AnswerFormat):
    """The common part of completions and chats.

    Args:
        answer_id: The answer's id.
        created: Seconds of the Unix epoch.
        model: The model's name.
        kind, chunk_kind: The type of a whole answer, and of a chunk.
    """

    def __init__(self, answer_id: str, created: int, model: str, kind: str, chunk_kind: str) -> None:
        shared = f'"created":{created},"model":{quoted(model)},"choices":['
        self._whole = f'{{"id":{quoted(answer_id)},"object":"{kind}",{shared}'
        self._chunk = f'data: {{"id":{quoted(answer_id)},"object":"{chunk_kind}",{shared}'

    def whole(self, pieces: list[Piece], usage: Usage) -> bytes:
        """Return the whole answer. pieces: one a choice."""
        choices = ",".join(self._choice(piece) for piece in pieces)
        return f'{self._whole}{choices}],"usage":{usage.json()}}}'.encode()

    def chunk(self, piece: Piece, ending: str) -> str:
        """Return an event of a stream. ending: a field with a comma before it, or nothing."""
        return f"{self._chunk}{self._delta(piece)}]{ending}}}\n\n"

    def last(self, usage: Usage) -> bytes:
        """Return the event after all choices, which has the usage."""
        return f'{self._chunk}],"usage":{usage.json()}}}\n\n'.encode()

    def _choice(self, piece: Piece) -> str:
        raise NotImplementedError

    def _delta(self, piece: Piece) -> str:
        raise NotImplementedError


class CompletionFormat(ChoicesFormat):
    """The answers of /v1/completions."""

    def __init__(self, answer_id: str, created: int, model: str) -> None:
        super().__init__(answer_id, created, model, "text_completion", "text_completion")

    def _choice(self, piece: Piece) -> str:
        return (
            f'{{"index":{piece.choice_index},"text":{quoted(piece.text)},"logprobs":{piece.logprobs},{_ending(piece)}}}'
        )

    _delta = _choice


class ChatFormat(ChoicesFormat):
    """The answers of /v1/chat/completions."""

    def __init__(self, answer_id: str, created: int, model: str) -> None:
        super().__init__(answer_id, created, model, "chat.completion", "chat.completion.chunk")

    def begin(self, num_choices: int, ending: str, usage: Usage) -> bytes:
        """Return a chunk for each choice that names the role."""
        role = '"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
        chunks = [f'{self._chunk}{{"index":{index},{role}{ending}}}\n\n' for index in range(num_choices)]
        return "".join(chunks).encode()

    def _choice(self, piece: Piece) -> str:
        content = quoted(piece.text) if piece.text or not piece.calls else "null"
        message = f'{{"role":"assistant","content":{content},"refusal":null{_beside(piece, is_part=False)}}}'
        return f'{{"index":{piece.choice_index},"message":{message},"logprobs":{piece.logprobs},{_ending(piece)}}}'

    def _delta(self, piece: Piece) -> str:
        beside = _beside(piece, is_part=True)
        has_text = piece.text or (piece.finish_reason is None and not beside)
        delta = f'{{"content":{quoted(piece.text)}{beside}}}' if has_text else f"{{{beside[1:]}}}"
        return f'{{"index":{piece.choice_index},"delta":{delta},"logprobs":{piece.logprobs},{_ending(piece)}}}'


def _beside(piece: Piece, is_part: bool) -> str:
    """Return the fields of thoughts and calls, each with a comma before it."""
    fields = f',"reasoning_content":{quoted(piece.reasoning)}' if piece.reasoning else ""
    if piece.calls:
        fields += f',"tool_calls":[{",".join(_call(call, is_part) for call in piece.calls)}]'
    return fields


def _call(call: CallPart, is_part: bool) -> str:
    index = f'"index":{call.index},' if is_part else ""
    if call.call_id is None or call.name is None:
        return f'{{{index}"function":{{"arguments":{quoted(call.arguments)}}}}}'
    function = f'{{"name":{quoted(call.name)},"arguments":{quoted(call.arguments)}}}'
    return f'{{{index}"id":{quoted(call.call_id)},"type":"function","function":{function}}}'


def _ending(piece: Piece) -> str:
    """Return the fields that both formats end a choice with."""
    ending = '"finish_reason":null' if piece.finish_reason is None else f'"finish_reason":"{piece.finish_reason}"'
    if piece.finish_reason is not None:
        ending += f',"stop_reason":{json.dumps(piece.stop_reason)}'
    if piece.token_ids is not None:
        ending += f',"token_ids":{long_list(piece.token_ids)}'
    if piece.prompt_token_ids is not None:
        ending += f',"prompt_token_ids":{long_list(piece.prompt_token_ids)}'
    return ending

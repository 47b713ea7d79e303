"""The script of an agent: five tools, turns of one conversation, and two subagents that branch off it.

    main   system, task ─► call, result ─► ... ─► delegate ──────────────────────► both results ─► ... ─► the last words
                                                    ├─► first  ─► call, result ─► ... ─► its last words ─┤
                                                    └─► second ─► call, result ─► ... ─► its last words ─┘

All that a model is to answer is in the script: a server is made to answer it. So the transcript is the same on all
servers, and a turn's prompt has the same tokens.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

Message = dict[str, Any]
MAIN, SUBAGENTS = "main", ("first", "second")
DELEGATE = "delegate"
PARAMETERS = {
    "read": {"path": "string", "line": "integer"},
    "write": {"path": "string", "text": "string"},
    "search": {"pattern": "string", "path": "string"},
    "run": {"command": "string"},
    DELEGATE: {"task": "string", "agents": "integer"},
}
"""The five tools, with the types of their arguments."""
WORDS = 1024  # that texts are made of, of as many letters each
FIRST_WORD = 1000


def tools() -> list[dict[str, Any]]:
    """Return the tools, as OpenAI's API takes them."""
    made = []
    for name, types in PARAMETERS.items():
        properties = {argument: {"type": kind} for argument, kind in types.items()}
        schema = {"type": "object", "properties": properties, "required": list(types)}
        function = {"name": name, "description": f"{name} something for the task", "parameters": schema}
        made.append({"type": "function", "function": function})
    return made


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer of the model.

    Attributes:
        conversation: Of which it is: "main", or a subagent's name.
        number: Its place there, from 1.
        messages: The prompt.
        words: The text of the answer before its call.
        tool: The tool that it calls; None for the last words of a conversation.
        arguments: Of the call.
    """

    conversation: str
    number: int
    messages: tuple[Message, ...]
    words: str
    tool: str | None
    arguments: dict[str, Any]

    @property
    def text(self) -> str:
        """The answer as the model writes it."""
        if self.tool is None:
            return self.words
        call = f'{{"name": "{self.tool}", "arguments": {json.dumps(self.arguments)}}}'
        return f"{self.words}\n<tool_call>\n{call}\n</tool_call>"

    def message(self) -> Message:
        """Return the answer as a message of the prompts that follow."""
        answer: Message = {"role": "assistant", "content": self.words}
        if self.tool is not None:
            function = {"name": self.tool, "arguments": json.dumps(self.arguments)}
            answer["tool_calls"] = [
                {"id": f"{self.conversation}{self.number}", "type": "function", "function": function}
            ]
        return answer


class AgentScript:
    """The turns of an agent.

    Args:
        num_turns: Of the main conversation, at least 4.
        num_sub_turns: Of each subagent, at least 1.
        system_words: Words of the system prompt.
        result_words: Words of a tool's result.
        seed: Other seeds give other words, so that no cache knows them.
    """

    def __init__(self, num_turns: int, num_sub_turns: int, system_words: int, result_words: int, seed: int) -> None:
        self._num_turns, self._num_sub_turns, self._rng = num_turns, num_sub_turns, Random(seed)
        self._result_words, system = result_words, self._words(system_words)
        self._main = [{"role": "system", "content": system}, {"role": "user", "content": self._words(20)}]

    def turns(self) -> Iterator[Turn]:
        """Yield all turns in their order; those of the subagents by turns, once the main conversation delegates."""
        names = [name for name in PARAMETERS if name != DELEGATE]
        for number in range(1, self._num_turns + 1):
            is_last, delegates = number == self._num_turns, number == self._num_turns // 4
            tool = None if is_last else DELEGATE if delegates else names[number % len(names)]
            turn = self._turn(MAIN, number, self._main, tool)
            yield turn
            self._main.append(turn.message())
            if delegates:
                yield from self._subagents()
            if tool is not None:
                self._main.append(self._result(turn))

    def _subagents(self) -> Iterator[Turn]:
        answered = self._main[:-1]  # the call that delegates has no result yet
        branches = {name: [*answered, {"role": "user", "content": self._words(20)}] for name in SUBAGENTS}
        for number in range(1, self._num_sub_turns + 1):
            for name, messages in branches.items():
                turn = self._turn(name, number, messages, None if number == self._num_sub_turns else "search")
                yield turn
                messages.append(turn.message())
                if turn.tool is not None:
                    messages.append(self._result(turn))

    def _turn(self, conversation: str, number: int, messages: list[Message], tool: str | None) -> Turn:
        words = f"Turn {number} of {conversation}."
        arguments = {} if tool is None else self._arguments(tool, number)
        return Turn(conversation, number, tuple(messages), words, tool, arguments)

    def _arguments(self, tool: str, number: int) -> dict[str, Any]:
        return {name: number if kind == "integer" else self._words(3) for name, kind in PARAMETERS[tool].items()}

    def _result(self, turn: Turn) -> Message:
        call_id = turn.message()["tool_calls"][0]["id"]
        return {"role": "tool", "tool_call_id": call_id, "content": self._words(self._result_words)}

    def _words(self, count: int) -> str:
        return " ".join(f"w{self._rng.randrange(FIRST_WORD, FIRST_WORD + WORDS)}" for _ in range(count))

"""AgentBound: the least that a server computes of each prompt of an agent."""

import json
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpage.benchmarks.agent_script import Turn, tools

Ids = npt.NDArray[np.int32]


class AgentBound:
    """Counts the tokens of prompts that stand in no earlier prompt with its answer, of this round or another.

    Args:
        tokenizer: The model's, with its template.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._earlier: list[Ids] = []

    def needed(self, turn: Turn) -> int:
        """Return how many tokens of a turn's prompt must be computed, one at least; the turn is an earlier one then."""
        prompt = self._ids(self._prompt(turn))
        known = max((_num_common(prompt, other) for other in self._earlier), default=0)
        self._earlier.append(np.concatenate((prompt, self._ids(turn.text))))
        return len(prompt) - min(known, len(prompt) - 1)

    def _prompt(self, turn: Turn) -> str:
        messages = [_for_template(message) for message in turn.messages]
        text: str = self._tokenizer.apply_chat_template(
            messages, tools=tools(), add_generation_prompt=True, tokenize=False
        )
        return text

    def _ids(self, text: str) -> Ids:
        return np.array(self._tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)


def _for_template(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose calls have their arguments as objects."""
    calls = [_with_object(call) for call in message.get("tool_calls", ())]
    return {**message, "tool_calls": calls} if calls else message


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}


def _num_common(one: Ids, other: Ids) -> int:
    most = min(len(one), len(other))
    differ = np.flatnonzero(one[:most] != other[:most])
    return int(differ[0]) if len(differ) else most

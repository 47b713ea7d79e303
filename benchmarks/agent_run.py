"""One agent on one server, by OpenAI's client: what each turn has cost, and whether the answer is the script's."""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvpage.benchmarks.agent_script import Turn, tools

MAX_TOKENS = 512  # of an answer


class WrongTurn(Exception):
    """A server has answered something else than the script's words and call, or counts other tokens."""


@dataclass(slots=True)
class TurnCost:
    """What a turn has cost. Times are in seconds from the request on.

    Attributes:
        turn: The turn.
        first: Until the first text; until the end without any.
        total: Until the end.
        num_prompt: Tokens of the prompt, as the server counts them.
        num_cached: Of these, tokens that were cached.
    """

    turn: Turn
    first: float
    total: float
    num_prompt: int
    num_cached: int

    @property
    def num_computed(self) -> int:
        """Tokens of the prompt that were computed."""
        return self.num_prompt - self.num_cached


@dataclass(slots=True)
class Answer:
    """A streamed answer, put together."""

    content: str = ""
    names: list[str] = field(default_factory=list)
    arguments: str = ""
    first: float | None = None
    usage: Any = None

    def take(self, chunk: Any, now: float) -> None:
        """Take a chunk that came `now`."""
        self.usage = chunk.usage or self.usage
        for choice in chunk.choices:
            delta = choice.delta
            if self.first is None and (delta.content or delta.tool_calls):
                self.first = now
            self.content += delta.content or ""
            for call in delta.tool_calls or ():
                self.names += [call.function.name] if call.function.name else []
                self.arguments += call.function.arguments or ""

    def check(self, turn: Turn) -> None:
        """Raise WrongTurn unless it is the script's answer."""
        expected = [] if turn.tool is None else [turn.tool]
        arguments = json.loads(self.arguments or "{}")
        if (self.content.strip(), self.names, arguments) != (turn.words, expected, turn.arguments):
            raise WrongTurn(
                f"turn {turn.number} of {turn.conversation} must be {turn.text!r}, got {self.content!r} with calls of "
                f"{self.names} with {self.arguments!r}"
            )


def ask(client: Any, model: str, turn: Turn) -> TurnCost:
    """Have a server answer one turn; the form of the answer leaves it one text alone. WrongTurn for another one."""
    begin, answer = time.perf_counter(), Answer()
    stream = client.chat.completions.create(
        model=model,
        messages=list(turn.messages),
        tools=tools(),
        temperature=0.0,
        max_tokens=MAX_TOKENS,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"structured_outputs": {"choice": [turn.text]}},
    )
    for chunk in stream:
        answer.take(chunk, time.perf_counter() - begin)
    total = time.perf_counter() - begin
    answer.check(turn)
    if answer.usage is None or answer.usage.prompt_tokens_details is None:
        raise WrongTurn(f"turn {turn.number} of {turn.conversation} has no usage with cached tokens")
    num_cached = answer.usage.prompt_tokens_details.cached_tokens or 0
    return TurnCost(
        turn, total if answer.first is None else answer.first, total, answer.usage.prompt_tokens, num_cached
    )


def run_agent(url: str, model: str, turns: Iterable[Turn], note: Callable[[], object]) -> list[TurnCost]:
    """Run all turns, one after the other. note: called after each. WrongTurn as of `ask`."""
    import openai

    costs = []
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        for turn in turns:
            costs.append(ask(client, model, turn))
            note()
    return costs


def check_same(costs: Mapping[str, Sequence[TurnCost]]) -> None:
    """Raise WrongTurn where servers count another number of tokens in the same prompt."""
    for each in zip(*costs.values(), strict=True):
        if len({cost.num_prompt for cost in each}) > 1:
            counts = {name: cost.num_prompt for name, cost in zip(costs, each, strict=True)}
            turn = each[0].turn
            raise WrongTurn(f"turn {turn.number} of {turn.conversation} must have the same tokens, got {counts}")

"""Generated traces of agents, for replays: sessions of many turns over long contexts, tools that pause, and subagents.

The statistics are those of AgentX's traces of coding agents: half of the sessions have 43 turns or more, a prompt has
142,000 tokens and an answer 444 at the median, and 44 % of the sessions start subagents. Pauses are lognormal, and of
users heavy-tailed. The same seed gives the same trace.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

from kvpage.checks.values import check_at_least
from kvpage.tools.replay import TraceRequest

DECODE_TOKENS_PER_SECOND = 60.0
TOOLS = (("read", 0.5, 1.5, 0.6), ("shell", 0.28, 10.0, 1.2), ("web", 0.1, 6.0, 0.8), ("user", 0.12, 90.0, 1.5))
"""Of each kind: its part of all calls, the median of its pause in seconds, and sigma of the pause's logarithm."""
SUBAGENTS_SECONDS = 120.0
"""What an agent expects of subagents."""


GROWN_AT_START, GROWN_BY_TURN = 18_000, 5_800
"""Tokens of a session's task, and at the median those that a turn adds: so a prompt has 142,000 at the median."""


@dataclass(frozen=True, slots=True)
class AgentTraceConfig:
    """What to generate.

    Attributes:
        num_sessions: Sessions of main agents.
        seconds: Sessions begin within so many seconds, evenly at random.
        hash_tokens: Tokens of a hash id.
        seed: Of the random numbers.

    Raises:
        ValueError: A number is below 1, or the seed below 0.
    """

    num_sessions: int = 60
    seconds: int = 1800
    hash_tokens: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("num_sessions", 1), ("seconds", 1), ("hash_tokens", 1), ("seed", 0)):
            check_at_least(name, getattr(self, name), least)


@dataclass(frozen=True, slots=True)
class Subagents:
    """The part of a session's turns that start subagents, and the system prompts of these."""

    part: float
    prompts: list[list[int]]


@dataclass(slots=True)
class _Generator:
    config: AgentTraceConfig
    rng: random.Random
    requests: list[TraceRequest] = field(default_factory=list)
    num_ids: int = 0
    num_sessions: int = 0

    def contents(self, num_tokens: float) -> list[int]:
        count = max(1, round(num_tokens / self.config.hash_tokens))
        self.num_ids += count
        return list(range(self.num_ids - count, self.num_ids))

    def lognormal(self, median: float, sigma: float) -> float:
        return self.rng.lognormvariate(math.log(median), sigma)

    def tool(self) -> tuple[str, float, float]:
        """Draw a call: the tool's kind, the seconds that it takes, and those that the agent expects."""
        kind = self.rng.choices(TOOLS, [part for _, part, _, _ in TOOLS])[0]
        return kind[0], self.lognormal(kind[2], kind[3]), kind[2]

    def session(self, start: float, prompt: list[int], num_turns: int, num_grown: int, subagents: Subagents) -> float:
        """Add the requests of a session. Return when it ends."""
        self.num_sessions += 1
        session, now = self.num_sessions, start
        for turn in range(num_turns):
            prompt = prompt + self.contents(self.lognormal(num_grown, 0.8))
            num_outputs = max(1, round(self.lognormal(444, 0.9)))
            tool, pause, expected = self.tool()
            end = now + 1 + num_outputs / DECODE_TOKENS_PER_SECOND
            is_last = turn == num_turns - 1
            if not is_last and self.rng.random() < subagents.part:
                ends = [self.subagent(end, subagents) for _ in range(self.rng.randint(1, 3))]
                tool, pause, expected = "subagents", max(ends) - end, SUBAGENTS_SECONDS
            size = len(prompt) * self.config.hash_tokens
            next_use = None if is_last else end - now + expected
            self.requests.append(
                TraceRequest(round(1000 * now), size, num_outputs, prompt, session, next_use, tool, is_last)
            )
            now = end + pause
        return now

    def subagent(self, start: float, subagents: Subagents) -> float:
        num_turns = max(2, int(self.lognormal(10, 0.6)))
        return self.session(start, self.rng.choice(subagents.prompts), num_turns, 3000, Subagents(0.0, []))


def agent_trace(config: AgentTraceConfig) -> list[TraceRequest]:
    """Return the requests of a generated trace, in the order of their arrival.

    Args:
        config: What to generate.
    """
    made = _Generator(config, random.Random(config.seed))
    systems = [made.contents(14_000) for _ in range(3)]
    prompts = [made.contents(9_000) for _ in range(4)]
    for _ in range(config.num_sessions):
        start = made.rng.random() * config.seconds
        task = made.contents(GROWN_AT_START)
        num_turns = max(2, int(made.lognormal(43, 0.7)))
        part = 0.05 if made.rng.random() < 0.44 else 0.0
        made.session(start, made.rng.choice(systems) + task, num_turns, GROWN_BY_TURN, Subagents(part, prompts))
    return sorted(made.requests, key=lambda request: request.timestamp)

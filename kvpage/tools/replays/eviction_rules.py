"""Rules of eviction in plain Python, to compare the tree's policies with in a replay: a bound, and two papers' rules.

    belady   the block whose next use is farthest goes first: the trace is known to its end. The bound.
    ttl      after CacheTTL (arXiv 2511.02230): a paused session's blocks are kept for a time that is worth it by the
             tool's earlier pauses and the cost to compute them again. All else goes by last use.
    pbkv     after PBKV (arXiv 2605.06472): a block is worth the sum over the sessions that need it of what a few steps
             ahead discount. Where that is equal, the one used last stays.

Only blocks from which no cached block goes on can go.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Sequence

from kvpage.tools.replay import TraceRequest

NEVER = 1 << 62


class Rule(ABC):
    """What blocks are worth: of those that may go, the one with the least goes first."""

    @abstractmethod
    def worth(self, block: int, now: float) -> tuple[float, ...]:
        """Return what a cached block is worth at `now`, in seconds."""

    @abstractmethod
    def use(self, index: int, request: TraceRequest) -> None:
        """Note the request with that index in the trace, which has been served."""


class Belady(Rule):
    """The farthest next use goes first.

    Args:
        requests: The whole trace.
    """

    def __init__(self, requests: Sequence[TraceRequest]) -> None:
        self._next: list[list[int]] = []
        upcoming: dict[int, int] = {}
        for index in range(len(requests) - 1, -1, -1):
            ids = requests[index].hash_ids
            self._next.append([upcoming.get(block, NEVER) for block in ids])
            upcoming.update(dict.fromkeys(ids, index))
        self._next.reverse()
        self._next_use: dict[int, int] = {}

    def worth(self, block: int, now: float) -> tuple[float, ...]:
        return (-self._next_use[block],)

    def use(self, index: int, request: TraceRequest) -> None:
        self._next_use.update(zip(request.hash_ids, self._next[index], strict=True))


class LastUse(Rule):
    """The least recently used block goes first."""

    def __init__(self) -> None:
        self.used: dict[int, int] = {}

    def worth(self, block: int, now: float) -> tuple[float, ...]:
        return (self.used[block],)

    def use(self, index: int, request: TraceRequest) -> None:
        self.used.update(dict.fromkeys(request.hash_ids, index))


class Ttl(LastUse):
    """Blocks of paused sessions are kept for the time t that has most of P(pause <= t) * cost - E[min(pause, t)].

    Args:
        tokens_per_second: At which lost blocks are computed again.
    """

    def __init__(self, tokens_per_second: float) -> None:
        super().__init__()
        self._speed = tokens_per_second
        self._pauses: defaultdict[str, list[float]] = defaultdict(list)  # of each tool, in order
        self._paused: dict[int, tuple[str, float]] = {}  # by session: the tool, and since when
        self._kept_until: dict[int, float] = {}

    def worth(self, block: int, now: float) -> tuple[float, ...]:
        kept_until = self._kept_until.get(block, 0.0)
        return (kept_until if kept_until > now else 0.0, self.used[block])

    def use(self, index: int, request: TraceRequest) -> None:
        super().use(index, request)
        now, session = request.timestamp / 1000, request.session
        if session is None or request.tool is None:
            return
        if session in self._paused:
            tool, since = self._paused.pop(session)
            insort(self._pauses[tool], now - since)
        kept_until = 0.0
        if not request.is_last:
            self._paused[session] = request.tool, now
            kept_until = now + self._best(self._pauses[request.tool], request.input_length / self._speed)
        for block in request.hash_ids:
            self._kept_until[block] = max(kept_until, self._kept_until.get(block, 0.0))

    @staticmethod
    def _best(pauses: list[float], cost: float) -> float:
        """Return the time for which to keep what costs so many seconds; nothing is known of a tool at first."""
        if not pauses:
            return cost
        best, most, passed = 0.0, 0.0, 0.0
        for pause in pauses[:: max(1, len(pauses) // 64)]:
            count = bisect_right(pauses, pause)
            passed = sum(pauses[:count]) / len(pauses) + pause * (1 - count / len(pauses))
            gain = cost * count / len(pauses) - passed
            if gain > most:
                best, most = pause, gain
        return best


class Pbkv(LastUse):
    """A block counts for each session that goes on, less by `discount` for each step until its turn."""

    discount = 0.8
    subagent_steps = 10  # that subagents take before their agent's turn comes

    def __init__(self) -> None:
        super().__init__()
        self._potential: dict[int, float] = {}  # by session
        self._sessions: defaultdict[int, set[int]] = defaultdict(set)  # by block
        self._blocks: dict[int, list[int]] = {}  # by session: those of its last prompt

    def worth(self, block: int, now: float) -> tuple[float, ...]:
        potentials = [self._potential[session] for session in self._sessions[block]]
        return (round(sum(potentials), 6), self.used[block])

    def use(self, index: int, request: TraceRequest) -> None:
        super().use(index, request)
        session = request.session
        if session is None:
            return
        for block in self._blocks.pop(session, ()):
            self._sessions[block].discard(session)
        if request.is_last:
            return
        self._potential[session] = self.discount ** (self.subagent_steps if request.tool == "subagents" else 1)
        self._blocks[session] = request.hash_ids
        for block in request.hash_ids:
            self._sessions[block].add(session)


class RuleCache:
    """Blocks of hash ids by a rule.

    Args:
        num_blocks: How many it holds.
        rule: Which go first.
    """

    def __init__(self, num_blocks: int, rule: Rule) -> None:
        self.num_blocks, self.rule = num_blocks, rule
        self._before: dict[int, int | None] = {}  # of each cached block, the one before it
        self._num_after: defaultdict[int, int] = defaultdict(int)
        self._ends: set[int] = set()  # blocks from which no other goes on

    def serve(self, index: int, request: TraceRequest) -> int:
        """Find and cache the blocks of a request. Return how many were found.

        Args:
            index: The request's index in the trace.
            request: The request. It fits into the cache.
        """
        ids = request.hash_ids
        num_found = next((i for i, block in enumerate(ids) if block not in self._before), len(ids))
        self._make_room(len(self._before) + len(ids) - num_found - self.num_blocks, set(ids), request.timestamp / 1000)
        before = ids[num_found - 1] if num_found else None
        for block in ids[num_found:]:
            self._before[block] = before
            if before is not None:
                self._num_after[before] += 1
                self._ends.discard(before)
            self._ends.add(block)
            before = block
        self.rule.use(index, request)
        return num_found

    def _make_room(self, num_blocks: int, in_use: set[int], now: float) -> None:
        if num_blocks <= 0:
            return
        order = [(self.rule.worth(block, now), block) for block in self._ends - in_use]
        heapq.heapify(order)
        for _ in range(num_blocks):
            _, block = heapq.heappop(order)
            before = self._before.pop(block)
            self._ends.remove(block)
            self._num_after.pop(block, None)
            if before is None:
                continue
            self._num_after[before] -= 1
            if self._num_after[before] == 0:
                self._ends.add(before)
                if before not in in_use:
                    heapq.heappush(order, (self.rule.worth(before, now), before))

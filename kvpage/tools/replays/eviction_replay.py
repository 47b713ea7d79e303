"""Policies of eviction side by side on one trace: the tree's own, its hints, and the rules of eviction_rules.

All see the same requests at the same times, and one device tier. A machine computes what was not found, one request
after the other; so a request waits for those before it. A session's job takes its time in the trace, and all waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import numpy as np

from kvpage._C import BlockPool, PrefixTree
from kvpage.blocks.config import EVICTIONS
from kvpage.tools.replay import TraceRequest
from kvpage.tools.replays.eviction_rules import Belady, Pbkv, Rule, RuleCache, Ttl

NAMES = *EVICTIONS, "hinted", "exact", "ttl", "pbkv", "belady"
"""What can be compared. hinted: cost, told when a session's next request is expected, and which one is its last. exact:
the same, told when it will come."""


@dataclass(frozen=True, slots=True)
class EvictionResult:
    """One policy on one trace.

    Attributes:
        name: The policy.
        device_blocks: Blocks of the cache.
        num_requests: Requests that fit into it; others are left out.
        prompt_tokens: Tokens of their prompts.
        hit_tokens: Those that were found.
        job_seconds: What a session took on average, from its first request to its last one's first token; of a trace
            without sessions, what a request took.
    """

    name: str
    device_blocks: int
    num_requests: int
    prompt_tokens: int
    hit_tokens: int
    job_seconds: float

    @property
    def hit_rate(self) -> float:
        """The part of the prompt tokens that was found, 0 to 1."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class Cache(Protocol):
    """Blocks of hash ids."""

    def serve(self, index: int, request: TraceRequest) -> int:
        """Find and cache the blocks of a request. Return how many were found."""


class TreeCache:
    """The real pool and prefix tree, in which a hash id is a block.

    Args:
        num_blocks: Blocks of the pool.
        eviction: The tree's policy.
        is_hinted: Whether it is told what is known of a session's next request.
    """

    def __init__(self, num_blocks: int, eviction: str, is_hinted: bool = False) -> None:
        self.pool = BlockPool(num_blocks)
        self.tree = PrefixTree(self.pool, 1, eviction=eviction)
        self.is_hinted = is_hinted

    def serve(self, index: int, request: TraceRequest) -> int:
        """Find and cache the blocks of a request. Return how many were found.

        Args:
            index: The request's index in the trace.
            request: The request. It fits into the pool.
        """
        ids = np.array(request.hash_ids, np.int32)
        self.tree.set_time(request.timestamp / 1000)
        match = self.tree.match(ids, num_left_over=0)
        num_found = match.num_blocks
        lacking = len(ids) - num_found - self.pool.num_free
        if lacking > 0:
            self.tree.evict(lacking)
        fresh = self.pool.allocate(len(ids) - num_found)
        self.tree.release(self.tree.insert(ids[num_found:], fresh, after=match))
        if self.is_hinted and request.next_use is not None:
            self.tree.set_next_use(ids, seconds=request.next_use)
        if self.is_hinted and request.is_last:
            self.tree.put_first(ids)
        return num_found


class SimulatedClock:
    """A machine that computes prompts one after the other, and the time that sessions take on it.

    Args:
        tokens_per_second: Speed of prefill.
    """

    def __init__(self, tokens_per_second: float) -> None:
        self._speed = tokens_per_second
        self._free_at = 0.0
        self._begun: dict[int, float] = {}
        self._seconds: dict[int, float] = {}  # by session, up to its last request
        self._waits: dict[int, float] = {}

    def serve(self, index: int, request: TraceRequest, num_tokens: int) -> None:
        """Note a request that computes so many tokens."""
        now, job = request.timestamp / 1000, index if request.session is None else request.session
        self._free_at = max(self._free_at, now) + num_tokens / self._speed
        self._waits[job] = self._waits.get(job, 0.0) + self._free_at - now
        self._seconds[job] = now - self._begun.setdefault(job, now)

    def job_seconds(self) -> float:
        """Return what a job took on average; 0 without jobs."""
        jobs = [self._seconds[job] + wait for job, wait in self._waits.items()]
        return sum(jobs) / len(jobs) if jobs else 0.0


def make_cache(name: str, num_blocks: int, requests: Sequence[TraceRequest], tokens_per_second: float) -> Cache:
    """Return an empty cache with one of NAMES.

    Args:
        name: The policy.
        num_blocks: Blocks of the cache.
        requests: The trace, which Belady's rule knows.
        tokens_per_second: Speed of prefill, by which a TTL is chosen.

    Raises:
        ValueError: The name is none of them.
    """
    if name in ("hinted", "exact"):
        return TreeCache(num_blocks, "cost", is_hinted=True)
    if name in EVICTIONS:
        return TreeCache(num_blocks, name)
    rules: dict[str, Callable[[], Rule]] = {
        "ttl": lambda: Ttl(tokens_per_second),
        "pbkv": Pbkv,
        "belady": lambda: Belady(requests),
    }
    if name not in NAMES:
        raise ValueError(f"eviction must be one of {', '.join(NAMES)}, got {name!r}")
    return RuleCache(num_blocks, rules[name]())


def with_exact_hints(requests: Sequence[TraceRequest]) -> list[TraceRequest]:
    """Return the requests, told when the next one of their session comes.

    Args:
        requests: The trace.
    """
    told, upcoming = [], dict[int, int]()
    for request in reversed(requests):
        next_use = None
        if request.session is not None:
            if request.session in upcoming:
                next_use = (upcoming[request.session] - request.timestamp) / 1000
            upcoming[request.session] = request.timestamp
        told.append(replace(request, next_use=next_use))
    return told[::-1]


def replay_eviction(
    name: str, requests: Sequence[TraceRequest], num_blocks: int, hash_tokens: int, tokens_per_second: float = 10_000.0
) -> EvictionResult:
    """Replay a trace under one policy.

    Args:
        name: One of NAMES.
        requests: The trace.
        num_blocks: Blocks of the cache, of `hash_tokens` tokens each.
        hash_tokens: Tokens of a hash id.
        tokens_per_second: Speed of prefill.

    Raises:
        ValueError: The name is unknown, or a number is not positive.
    """
    if num_blocks < 1 or not tokens_per_second > 0:
        raise ValueError(f"num_blocks and tokens_per_second must be positive, got {num_blocks}, {tokens_per_second}")
    fitting = [request for request in requests if len(request.hash_ids) <= num_blocks]
    if name == "exact":
        fitting = with_exact_hints(fitting)
    cache, clock = make_cache(name, num_blocks, fitting, tokens_per_second), SimulatedClock(tokens_per_second)
    num_hits = num_tokens = 0
    for index, request in enumerate(fitting):
        num_found = min(cache.serve(index, request) * hash_tokens, request.input_length)
        clock.serve(index, request, request.input_length - num_found)
        num_hits += num_found
        num_tokens += request.input_length
    return EvictionResult(name, num_blocks, len(fitting), num_tokens, num_hits, clock.job_seconds())


def figures(results: Sequence[EvictionResult]) -> list[dict[str, Any]]:
    """Return the numbers of all results, ready for JSON, with what each is beside LRU and beside Belady's.

    Args:
        results: Of one trace. Shares are there where lru, or belady, has a result of the same size.
    """
    by_name = {(result.name, result.device_blocks): result for result in results}
    rows = []
    for result in results:
        row = asdict(result) | {"hit_rate": result.hit_rate}
        lru, best = (by_name.get((name, result.device_blocks)) for name in ("lru", "belady"))
        if lru is not None:
            missed = lru.prompt_tokens - lru.hit_tokens
            row["misses_saved"] = (result.hit_tokens - lru.hit_tokens) / missed if missed else 0.0
            row["job_speedup"] = lru.job_seconds / result.job_seconds if result.job_seconds else 1.0
        if best is not None:
            row["part_of_belady"] = result.hit_tokens / best.hit_tokens if best.hit_tokens else 1.0
        rows.append(row)
    return rows

"""Replay of a production trace against the real pool, prefix tree and tiers, without a model and tensors.

    line of the trace ─► keys of its blocks ─► match ─► promote ─► evict or demote ─► allocate ─► insert ─► release
    (timestamp, input_length, output_length, hash_ids: one for each `hash_tokens` tokens)

Requests run one after the other. Blocks of `block_size` tokens are the tree's. A hash id represents the content of
hash_tokens / block_size of them, so (hash id, number within it) names a block. The tree holds one such key where a
server's tree holds the block's tokens. Hits, evictions and losses are the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvpage._C import BlockPool, PrefixTree
from kvpage.checks.values import check_at_least

__all__ = ["POLICIES", "Replay", "ReplayConfig", "ReplayReport", "TraceError", "TraceRequest", "read_trace"]

POLICIES = ("on_eviction", "at_once")


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One line of a trace.

    Attributes:
        timestamp: Milliseconds since the trace began.
        input_length: Tokens of the prompt.
        output_length: Generated tokens.
        hash_ids: Ids of the prompt's contents, one for each `hash_tokens` tokens.
        session: The number of the session that it is of; None where the trace names none.
        next_use: Seconds after its arrival in which the session's next request is expected; None where nobody knows.
        tool: The kind of tool that the session pauses for after it; None where nobody knows.
        is_last: Whether it is known to be its session's last one.
    """

    timestamp: int
    input_length: int
    output_length: int
    hash_ids: list[int]
    session: int | None = None
    next_use: float | None = None
    tool: str | None = None
    is_last: bool = False


class TraceError(ValueError):
    """A malformed line of a trace. The message has its number."""


@dataclass(frozen=True, slots=True)
class ReplayConfig:
    """The simulated machine.

    Attributes:
        device_blocks: Blocks of the device tier.
        host_blocks: Blocks of the host tier; 0 for no host tier.
        block_size: Tokens of a block.
        hash_tokens: Tokens of a hash id, a multiple of block_size.
        policy: When a block gets its host copy: "on_eviction", or "at_once" (as soon as it is computed).
        with_outputs: Whether generated tokens occupy blocks while their request runs. They are never found, since a
            trace does not name them.
        block_bytes: Bytes of a block in all layers; 0: no volumes and no loading times.
        prefill_tokens_per_second: Prefill speed of one such machine; None: no times to first token. A trace of a whole
            fleet needs more than one machine. Then requests queue without end.
        host_bytes_per_second: Bandwidth from the host, for the times to first token.
        state_slots: State slots of the device, for models with states: one is the running request's, the others are
            for checkpoints. 0: the model has attention alone.
        host_state_slots: State slots of the host.
        checkpoint_every: Tokens of a prompt between two checkpoints, as far as slots are free. Others are always taken.
            None: no more than these. It is a multiple of block_size.
        state_bytes: Bytes of a slot; 0: no volumes of states.

    Raises:
        ValueError: A number or the policy is out of range.
    """

    device_blocks: int
    host_blocks: int = 0
    block_size: int = 16
    hash_tokens: int = 512
    policy: str = "on_eviction"
    with_outputs: bool = False
    block_bytes: int = 0
    prefill_tokens_per_second: float | None = None
    host_bytes_per_second: float = 50e9
    state_slots: int = 0
    host_state_slots: int = 0
    checkpoint_every: int | None = None
    state_bytes: int = 0

    def __post_init__(self) -> None:
        for name, least in (("device_blocks", 1), ("host_blocks", 0), ("block_size", 1), ("block_bytes", 0)):
            check_at_least(name, getattr(self, name), least)
        for name in ("state_slots", "host_state_slots", "state_bytes"):
            check_at_least(name, getattr(self, name), 0)
        self._check_states()
        if self.hash_tokens < 1 or self.hash_tokens % self.block_size:
            raise ValueError(f"hash_tokens must be a multiple of block_size={self.block_size}, got {self.hash_tokens}")
        if self.policy not in POLICIES:
            raise ValueError(f"policy must be one of {', '.join(POLICIES)}, got {self.policy!r}")
        for name in ("prefill_tokens_per_second", "host_bytes_per_second"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be positive, got {value!r}")
        if self.host_bytes_per_second is None:
            raise ValueError("host_bytes_per_second must be positive, got None")

    def _check_states(self) -> None:
        interval = self.checkpoint_every
        if interval is not None and (type(interval) is not int or interval < 1 or interval % self.block_size):
            raise ValueError(f"checkpoint_every must be a multiple of block_size={self.block_size}, got {interval!r}")
        if not self.state_slots and (self.host_state_slots or interval is not None):
            raise ValueError("state_slots must be positive where host_state_slots or checkpoint_every is given, got 0")


class Served(NamedTuple):
    """The blocks and states that one request has found, moved and lost. num_kv_blocks: whose K and V were cached."""

    num_on_device: int = 0
    num_loaded: int = 0
    num_stored: int = 0
    num_states_loaded: int = 0
    num_states_stored: int = 0
    num_kv_blocks: int = 0
    num_lost_on_host: int = 0


@dataclass(slots=True)
class ReplayReport:
    """Counts of a replay, in tokens unless the name says otherwise.

    Attributes:
        requests: Number of requests.
        skipped: Number of requests whose prompt alone is larger than the device tier.
        prompt_tokens: Tokens of all prompts.
        device_hit_tokens: Prompt tokens found on the device.
        host_hit_tokens: Prompt tokens found on the host.
        computed_tokens: Prompt tokens that were not found.
        evicted_blocks: Blocks that left the device.
        demoted_blocks: The evicted blocks that were copied to the host for it.
        lost_host_blocks: Blocks that left the host.
        loaded_bytes: Bytes from host to device.
        stored_bytes: Bytes from device to host.
        peak_bytes_per_second: Rate of both, in the busiest minute.
        trace_seconds: Duration of the trace.
        first_token_seconds: Seconds of each request for loading and computing, alone on the machine. Empty where the
            speed of prefill is not given.
        queued_seconds: The same, with the wait for earlier requests at the trace's pace.
        used_blocks: (timestamp, device blocks in use, host blocks in use), some hundred points.
        kv_tokens: Prompt tokens whose K and V were cached. Tokens that are no hits lacked a state. 0 without states.
        kept_states: Checkpoints that were taken.
        restored_states: Requests that began at a checkpoint.
        evicted_states: Checkpoints that left the device for others.
        lost_states: Checkpoints whose K and V were evicted.
    """

    requests: int = 0
    skipped: int = 0
    prompt_tokens: int = 0
    device_hit_tokens: int = 0
    host_hit_tokens: int = 0
    computed_tokens: int = 0
    evicted_blocks: int = 0
    demoted_blocks: int = 0
    lost_host_blocks: int = 0
    loaded_bytes: int = 0
    stored_bytes: int = 0
    peak_bytes_per_second: float = 0.0
    trace_seconds: float = 0.0
    first_token_seconds: list[float] = field(default_factory=list)
    queued_seconds: list[float] = field(default_factory=list)
    used_blocks: list[tuple[int, int, int]] = field(default_factory=list)
    kv_tokens: int = 0
    kept_states: int = 0
    restored_states: int = 0
    evicted_states: int = 0
    lost_states: int = 0

    @property
    def hit_rate(self) -> float:
        """The part of the prompt tokens that was found, 0 to 1."""
        hits = self.device_hit_tokens + self.host_hit_tokens
        return hits / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def bytes_per_second(self) -> float:
        """Mean rate of the transfers at the trace's pace."""
        return (self.loaded_bytes + self.stored_bytes) / self.trace_seconds if self.trace_seconds else 0.0

    @property
    def computed_tokens_per_second(self) -> float:
        """Mean prefill speed that the trace's pace needs."""
        return self.computed_tokens / self.trace_seconds if self.trace_seconds else 0.0

    @property
    def busy_share(self) -> float:
        """The part of the trace's time that loading and computing fill. Above 1 the queue grows to the end."""
        return sum(self.first_token_seconds) / self.trace_seconds if self.trace_seconds else 0.0

    def percentile(self, name: str, percent: float) -> float:
        """Return a percentile of first_token_seconds or queued_seconds; 0 without requests.

        Args:
            name: "first_token_seconds" or "queued_seconds".
            percent: 0 to 100.
        """
        values = getattr(self, name)
        return float(np.percentile(values, percent)) if values else 0.0


def read_trace(lines: Iterable[str]) -> Iterator[TraceRequest]:
    """Yield the requests of a JSON-lines trace. Empty lines are skipped.

    Args:
        lines: The lines.

    Raises:
        TraceError: A line is malformed.
    """
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield _request(json.loads(line))
        except (ValueError, TypeError, KeyError) as error:
            reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
            raise TraceError(f"line {number} of the trace is malformed: {reason}") from error


def _request(record: Any) -> TraceRequest:
    if not isinstance(record, dict):
        raise TypeError(f"it must be an object, got {type(record).__name__}")
    for name in ("timestamp", "input_length", "output_length"):
        value = record[name]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
            raise ValueError(f"{name} must be a number of at least 0, got {value!r}")
    hash_ids = record["hash_ids"]
    if not isinstance(hash_ids, list) or not all(type(hash_id) is int for hash_id in hash_ids):
        raise ValueError("hash_ids must be a list of integers")
    return TraceRequest(int(record["timestamp"]), int(record["input_length"]), int(record["output_length"]), hash_ids)


class Replay:
    """A device tier and a host tier that requests fill, and the counts.

    Args:
        config: The simulated machine.
    """

    def __init__(self, config: ReplayConfig) -> None:
        self.config = config
        self.report = ReplayReport()
        self.pool, self.host_pool, self.tree = self._tiers()  # a key represents a block's tokens
        self._keys: dict[int, int] = {}  # the first key of each hash id
        self._per_hash = config.hash_tokens // config.block_size
        self._within = np.arange(self._per_hash, dtype=np.int32)
        self._moved_in_minute: dict[int, int] = {}
        self._free_at = 0.0  # when the machine has finished the requests before

    def run(self, requests: Iterable[TraceRequest], on_request: Callable[[], None] | None = None) -> ReplayReport:
        """Replay all requests.

        Args:
            requests: The requests.
            on_request: Called after each request, for a progress bar.

        Returns:
            The counts.

        Raises:
            ValueError: A request has too few hash ids for its length.
        """
        for request in requests:
            self.step(request)
            if on_request:
                on_request()
        return self.finish()

    def step(self, request: TraceRequest) -> None:
        """Replay one request, from its arrival to its first token. Its blocks stay cached.

        Args:
            request: The request.

        Raises:
            ValueError: It has too few hash ids for its length.
        """
        config, report = self.config, self.report
        keys = self._block_keys(request)
        # The last block of a prompt that is cached whole is computed again, into a block of its own.
        num_blocks = -(-request.input_length // config.block_size)
        num_outputs = 0
        if config.with_outputs:
            num_outputs = -(-(request.input_length + request.output_length) // config.block_size) - num_blocks
        report.requests += 1
        report.trace_seconds = max(report.trace_seconds, request.timestamp / 1000)
        if num_blocks + num_outputs > config.device_blocks:
            report.skipped += 1
            return
        report.prompt_tokens += request.input_length
        stop = min(len(keys), max(request.input_length - 1, 0) // config.block_size)
        self._count(request, self._serve(keys, stop, num_blocks + num_outputs))

    def _tiers(self) -> tuple[BlockPool, BlockPool | None, PrefixTree]:
        pool = BlockPool(self.config.device_blocks)
        host_pool = BlockPool(self.config.host_blocks) if self.config.host_blocks else None
        return pool, host_pool, PrefixTree(pool, 1, host_pool)

    def _serve(self, keys: npt.NDArray[np.int32], stop: int, num_blocks: int) -> Served:
        """Find, take and cache the blocks of a request.

        Args:
            keys: Keys of the whole blocks of its prompt.
            stop: How many of them can be found.
            num_blocks: All blocks that it needs.
        """
        match = self.tree.match(keys[:stop], num_left_over=0)
        num_found = num_on_device = match.num_blocks
        if self.host_pool:
            num_on_device = match.num_device_blocks
        fresh, stored = self._take(num_blocks - num_on_device)
        num_loaded = num_found - num_on_device
        if num_loaded:
            self.tree.promote(match, fresh[:num_loaded])
        num_new = len(keys) - num_found
        match = self.tree.insert(keys[num_found:], fresh[num_loaded : num_loaded + num_new], after=match)
        if self.config.policy == "at_once" and self.host_pool:
            stored += len(self.tree.write_out(match))
        self.tree.release(match)
        self.pool.release(fresh[num_loaded + num_new :])
        return Served(num_on_device, num_loaded, stored)

    def finish(self) -> ReplayReport:
        """Return the counts."""
        if self._moved_in_minute:
            self.report.peak_bytes_per_second = max(self._moved_in_minute.values()) / 60
        return self.report

    def _block_keys(self, request: TraceRequest) -> npt.NDArray[np.int32]:
        """Return a key for each whole block of the prompt."""
        num_hashes = -(-request.input_length // self.config.hash_tokens)
        if len(request.hash_ids) < num_hashes:
            raise ValueError(
                f"hash_ids must name {num_hashes} runs of {self.config.hash_tokens} tokens for {request.input_length} "
                f"tokens, got {len(request.hash_ids)}"
            )
        known, per_hash = self._keys, self._per_hash
        firsts = [known.setdefault(hash_id, len(known) * per_hash) for hash_id in request.hash_ids[:num_hashes]]
        keys = np.array(firsts, np.int32)[:, None] + self._within
        return keys.reshape(-1)[: request.input_length // self.config.block_size]

    def _take(self, num_blocks: int) -> tuple[npt.NDArray[np.int32], int]:
        """Return blocks for a request, evicted where too few are free, and how many went to the host for it."""
        lacking, num_stored = num_blocks - self.pool.num_free, 0
        if lacking > 0:
            self.report.evicted_blocks += lacking
            if self.host_pool:
                before = self.tree.num_host_cached
                num_stored = len(self.tree.demote(lacking)[1])
                self.report.demoted_blocks += num_stored
                self.report.lost_host_blocks += before + num_stored - self.tree.num_host_cached
            else:
                self.tree.evict(lacking)
        return self.pool.allocate(num_blocks), num_stored

    def _count(self, request: TraceRequest, served: Served) -> None:
        config, report = self.config, self.report
        report.device_hit_tokens += served.num_on_device * config.block_size
        report.host_hit_tokens += served.num_loaded * config.block_size
        report.kv_tokens += served.num_kv_blocks * config.block_size
        report.lost_host_blocks += served.num_lost_on_host
        loaded = served.num_loaded * config.block_bytes + served.num_states_loaded * config.state_bytes
        stored = served.num_stored * config.block_bytes + served.num_states_stored * config.state_bytes
        report.loaded_bytes += loaded
        report.stored_bytes += stored
        if loaded or stored:
            minute = request.timestamp // 60_000
            self._moved_in_minute[minute] = self._moved_in_minute.get(minute, 0) + loaded + stored
        computed = request.input_length - (served.num_on_device + served.num_loaded) * config.block_size
        report.computed_tokens += computed
        if config.prefill_tokens_per_second is not None:
            seconds = loaded / config.host_bytes_per_second + computed / config.prefill_tokens_per_second
            arrival = request.timestamp / 1000
            self._free_at = max(self._free_at, arrival) + seconds
            report.first_token_seconds.append(seconds)
            report.queued_seconds.append(self._free_at - arrival)
        if not report.used_blocks or request.timestamp > report.used_blocks[-1][0] + 5_000:
            num_host = self.tree.num_host_cached
            report.used_blocks.append((request.timestamp, config.device_blocks - self.pool.num_free, num_host))

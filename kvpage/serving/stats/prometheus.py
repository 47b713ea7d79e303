"""EngineCollector: an engine's numbers for Prometheus. It needs the extra `metrics`.

It reads `Engine.stats()` whenever the registry is asked, in any thread.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

try:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
    from prometheus_client.registry import Collector
except ModuleNotFoundError as error:
    message = "metrics need the extra 'metrics': pip install 'kvpage[metrics]'"
    raise ModuleNotFoundError(message, name=error.name) from error

from kvpage.blocks.groups.window_blocks import WindowStats
from kvpage.blocks.stats import SlotStats
from kvpage.observe.histogram import HistogramStats
from kvpage.serving.blending.connector import BlendStats
from kvpage.serving.loop.store_connector import StoreConnectorStats
from kvpage.serving.sessions.stats import SessionStats
from kvpage.serving.stats.engine_stats import EngineStats

__all__ = ["EngineCollector", "HasStats"]

Values = Mapping[Any, float]  # by the labels' values, a tuple of str


class HasStats(Protocol):
    """An engine, or an AsyncEngine around one."""

    def stats(self) -> EngineStats:
        """Return counters and the state now. It is called in any thread.

        Returns:
            The numbers.
        """
        ...


class EngineCollector(Collector):
    """The metrics of one engine, all named `kvpage_...`.

    Args:
        engine: The engine, or an AsyncEngine around it.
        labels: Put on every metric, as {"model": "llama"}.
    """

    def __init__(self, engine: HasStats, labels: Mapping[str, str] | None = None) -> None:
        self._engine = engine
        self._labels = dict(labels or {})

    def describe(self) -> list[Metric]:
        """Return nothing: a check of names for conflicts would ask the engine while it is being registered."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics, with the engine's numbers of now."""
        stats = self._engine.stats()
        yield from self._gauges(stats)
        yield from self._tokens(stats)
        yield from self._requests(stats)
        yield from self._blocks(stats)
        if stats.blocks.slots is not None:
            yield from self._states(stats.blocks.slots, stats.slot_bytes)
        if stats.windows:
            yield from self._windows(stats.windows)
        yield from self._sessions(stats.sessions)
        yield from self._transfers(stats)
        yield from self._residency(stats)
        if stats.store is not None:
            yield from self._stores(stats.store)
        if stats.blend is not None:
            yield from self._blends(stats.blend)

    def _gauges(self, stats: EngineStats) -> Iterator[Metric]:
        blocks, space = stats.blocks, stats.blocks.space
        num_owned = space.num_host_blocks - space.num_free_host_blocks - space.num_cached_host_blocks
        states = {
            ("device", "used"): blocks.num_used_blocks,
            ("device", "evictable"): blocks.num_evictable_blocks,
            ("device", "free"): blocks.num_free_blocks,
            ("host", "used"): num_owned,
            ("host", "cached"): space.num_cached_host_blocks,
            ("host", "free"): space.num_free_host_blocks,
        }
        yield self._gauge("blocks", "Blocks by tier and state.", states, "tier", "state")
        yield self._gauge("pinned_blocks", "Blocks that users' pins hold.", {(): space.num_pinned_blocks})
        requests = {("running",): stats.num_running, ("waiting",): stats.num_waiting}
        yield self._gauge("requests", "Requests by state.", requests, "state")

    def _sessions(self, stats: SessionStats) -> Iterator[Metric]:
        states = {("all",): stats.num_sessions, ("paused",): stats.num_paused}
        yield self._gauge("sessions", "Sessions, and those that pause now.", states, "state")
        yield self._gauge("session_tokens", "Tokens of all branches of sessions.", {(): stats.num_tokens})
        yield self._gauge("session_blocks", "Blocks that sessions retain.", {(): stats.num_retained_blocks})
        kinds = {("opened",): stats.num_opened, ("restored",): stats.num_restored, ("forgotten",): stats.num_forgotten}
        yield self._counter("session_events", "Sessions by what became of them.", kinds, "kind")
        yield self._counter("session_refusals", "Branches not kept for lack of a quota.", {(): stats.num_refused})

    def _tokens(self, stats: EngineStats) -> Iterator[Metric]:
        space = stats.blocks.space
        hits = {(tier,): getattr(space, f"{tier}_hit_tokens") for tier in ("device", "host", "part")}
        yield self._counter("query_tokens", "Tokens of prompts that were looked up.", {(): space.query_tokens})
        yield self._counter("hit_tokens", "Tokens found, by tier; part: parts of blocks.", hits, "tier")
        yield self._counter("miss_tokens", "Tokens not found, or not loaded.", {(): space.miss_tokens})
        refused = {(): space.refused_tokens}
        yield self._counter("refused_tokens", "Tokens on the host that are faster to compute than to load.", refused)
        yield self._counter("computed_tokens", "Tokens whose K and V were computed.", {(): stats.num_computed_tokens})
        yield self._counter("generated_tokens", "Tokens sampled.", {(): stats.num_generated_tokens})

    def _requests(self, stats: EngineStats) -> Iterator[Metric]:
        yield self._counter("steps", "Steps.", {(): stats.num_steps})
        yield self._counter("finished_requests", "Requests that ended, aborted ones too.", {(): stats.num_finished})
        kinds = {("swap",): stats.num_swaps, ("recompute",): stats.num_preemptions - stats.num_swaps}
        yield self._counter("preemptions", "Requests that gave their blocks back, by what they left.", kinds, "kind")
        if stats.num_lost_events is not None:
            yield self._counter("lost_event_batches", "Batches of events dropped.", {(): stats.num_lost_events})

    def _blocks(self, stats: EngineStats) -> Iterator[Metric]:
        space = stats.blocks.space
        evicted = {("device",): space.evicted_blocks, ("host",): space.host_evicted_blocks}
        yield self._counter("evicted_blocks", "Cached blocks that have left a tier.", evicted, "tier")
        yield self._counter("demoted_blocks", "Copied to the host when evicted.", {(): space.demoted_blocks})
        yield self._counter("written_blocks", "Copied to the host before.", {(): space.written_blocks})
        yield self._counter("promoted_blocks", "Brought back from the host.", {(): space.promoted_blocks})

    def _states(self, slots: SlotStats, slot_bytes: int) -> Iterator[Metric]:
        numbers = {
            ("device", "used"): slots.num_used_slots,
            ("device", "checkpoint"): slots.num_checkpoints,
            ("device", "free"): slots.num_free_slots,
            ("host", "used"): slots.num_used_host_slots,
            ("host", "checkpoint"): slots.num_host_checkpoints,
            ("host", "free"): slots.num_free_host_slots,
        }
        yield self._gauge("state_slots", "Slots of states by tier and use.", numbers, "tier", "state")
        sizes = {key: number * slot_bytes for key, number in numbers.items()}
        yield self._gauge("state_bytes", "Their bytes, with the K and V beside them.", sizes, "tier", "state")
        counts = {(name,): getattr(slots, name) for name in ("kept", "restored", "evicted", "demoted", "lost")}
        text = "Checkpoints by what became of them; demoted: those evicted to the host."
        yield self._counter("checkpoints", text, counts, "event")

    def _windows(self, windows: Sequence[WindowStats]) -> Iterator[Metric]:
        numbers = {}
        for window in windows:
            numbers[str(window.num_tokens), "used"] = window.num_used_blocks
            numbers[str(window.num_tokens), "evictable"] = window.num_evictable_blocks
            numbers[str(window.num_tokens), "free"] = window.num_free_blocks
        yield self._gauge("window_blocks", "Blocks of windows by their tokens and state.", numbers, "window", "state")
        evicted = {(str(window.num_tokens),): window.evicted_blocks for window in windows}
        yield self._counter("evicted_window_blocks", "Cached blocks of windows that made room.", evicted, "window")
        promoted = {(str(window.num_tokens),): window.promoted_blocks for window in windows}
        yield self._counter("promoted_window_blocks", "Blocks of windows back from the host.", promoted, "window")

    def _transfers(self, stats: EngineStats) -> Iterator[Metric]:
        moves = stats.transfers.items()
        numbers = {(kind,): move.num_blocks for kind, move in moves}
        yield self._counter("transfer_blocks", "Blocks moved, by kind.", numbers, "kind")
        sizes = {(kind,): move.num_bytes for kind, move in moves}
        yield self._counter("transfer_bytes", "Bytes moved, by kind.", sizes, "kind")
        times = {(kind,): move.seconds for kind, move in moves}
        yield self._counter("transfer_seconds", "Time that moves took, by kind.", times, "kind")

    def _residency(self, stats: EngineStats) -> Iterator[Metric]:
        if stats.residency is None:
            return
        lifetimes = {tier: of.lifetime for tier, of in stats.residency.items()}
        yield self._histogram("block_lifetime_seconds", "From a block's coming to its leaving, sampled.", lifetimes)
        idle_times = {tier: of.idle_time for tier, of in stats.residency.items()}
        yield self._histogram("block_idle_seconds", "From a block's last use to its leaving, sampled.", idle_times)

    def _stores(self, stats: StoreConnectorStats) -> Iterator[Metric]:
        tokens = {("looked_up",): stats.num_lookup_tokens, ("found",): stats.num_found_tokens}
        tokens |= {("loaded",): stats.num_loaded_tokens, ("refused",): stats.num_refused_tokens}
        tokens |= {("stored",): stats.num_stored_tokens}
        yield self._counter("store_tokens", "Tokens of prompts at the store, by what became of them.", tokens, "kind")
        trouble = {("late",): stats.num_late, ("error",): stats.num_errors, ("skipped",): stats.num_skipped}
        text = "Loads not waited for, exceptions of the store, and prompts not stored because too many were."
        yield self._counter("store_trouble", text, trouble, "kind")
        times = {("load",): stats.load_seconds, ("store",): stats.store_seconds}
        yield self._counter("store_seconds", "Time that the threads spent, by kind.", times, "kind")

    def _blends(self, stats: BlendStats) -> Iterator[Metric]:
        yield self._counter("blends", "Prefills that reused segments.", {(): stats.num_blends})
        kinds = {("reused",): stats.num_reused_tokens, ("recomputed",): stats.num_recomputed_tokens}
        yield self._counter("blend_tokens", "Tokens that segments had, by what became of them.", kinds, "kind")
        lookups = {("found",): stats.num_found_tokens, ("missing",): stats.num_lookup_tokens - stats.num_found_tokens}
        yield self._counter("blend_lookup_tokens", "Tokens of segments that were looked up.", lookups, "outcome")
        yield self._counter("blend_kept_segments", "Segments handed to be kept.", {(): stats.num_kept_segments})
        yield self._counter("blend_kept_tokens", "Their tokens.", {(): stats.num_kept_tokens})
        trouble = {("late",): stats.num_late, ("error",): stats.num_errors}
        yield self._counter("blend_trouble", "Lookups not waited for, and exceptions of the source.", trouble, "kind")

    # --- families ---

    def _gauge(self, name: str, text: str, values: Values, *labels: str) -> Metric:
        return self._filled(GaugeMetricFamily(f"kvpage_{name}", text, labels=[*self._labels, *labels]), values)

    def _counter(self, name: str, text: str, values: Values, *labels: str) -> Metric:
        return self._filled(CounterMetricFamily(f"kvpage_{name}", text, labels=[*self._labels, *labels]), values)

    def _filled(self, family: GaugeMetricFamily | CounterMetricFamily, values: Values) -> Metric:
        for key, value in values.items():
            family.add_metric([*self._labels.values(), *key], value)
        return family

    def _histogram(self, name: str, text: str, by_tier: Mapping[str, HistogramStats]) -> Metric:
        family = HistogramMetricFamily(f"kvpage_{name}", text, labels=[*self._labels, "tier"])
        for tier, stats in by_tier.items():
            buckets, below = [], 0
            for bound, count in zip((*stats.bounds, float("inf")), stats.counts, strict=True):
                below += count
                buckets.append(("+Inf" if bound == float("inf") else repr(bound), below))
            family.add_metric([*self._labels.values(), tier], buckets, stats.total)
        return family

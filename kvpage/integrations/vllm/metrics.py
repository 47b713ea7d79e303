"""The tier's own metrics, beside vLLM's numbers of every tier: bytes, seconds, queries, hits and failed jobs."""

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from kvpage.checks.started_pool import begun, started_pool
from kvpage.store import ByteStoreStats, ByteTierStats

logger = logging.getLogger(__name__)

PLACE = "place"  # which of the store's tiers
PREFIX = "vllm:kvpage_"  # vLLM gives out no others
COUNTERS: Mapping[str, str] = MappingProxyType(
    {
        "vllm:kvpage_corrupt_records": "Records that were dropped, since their bytes were not right.",
        "vllm:kvpage_tier_errors": "Calls of a place that failed or ran out of time.",
        "vllm:kvpage_failed_loads": "Chunks that the store seemed to have, and did not give.",
        "vllm:kvpage_failed_stores": "Chunks that no place took.",
        "vllm:kvpage_dropped_stores": "Chunks that were not stored since too many bytes were waiting.",
        "vllm:kvpage_unanswered_lookups": "Look-ups that were misses since no answer came in time.",
        "vllm:kvpage_lost_events": "Events of chunks that were lost, since too many waited.",
    }
)
PLACE_COUNTERS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "vllm:kvpage_place_hits": ("hits", "Records that were read from a place."),
        "vllm:kvpage_place_misses": ("misses", "Records that a place was asked for in vain."),
        "vllm:kvpage_place_read_bytes": ("read_bytes", "Bytes that were read from a place."),
        "vllm:kvpage_place_read_seconds": ("read_seconds", "Seconds of reading from a place."),
        "vllm:kvpage_place_written_bytes": ("written_bytes", "Bytes that were written to a place."),
        "vllm:kvpage_place_write_seconds": ("write_seconds", "Seconds of writing to a place."),
        "vllm:kvpage_place_evicted": ("evicted", "Records that went to make room in a place."),
    }
)
PLACE_GAUGES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "vllm:kvpage_place_bytes": ("num_bytes", "Bytes of the records in a place."),
        "vllm:kvpage_place_records": ("num_records", "Records in a place."),
        "vllm:kvpage_place_capacity_bytes": ("capacity", "Bytes that there may be in a place."),
    }
)


@dataclass(frozen=True, slots=True)
class TierCounts:
    """Chunks that the tier has counted itself, since it was made.

    Attributes:
        failed_loads: That the store seemed to have, and did not give.
        failed_stores: That no place took.
        dropped_stores: That were not stored since too many bytes were waiting.
        unanswered_lookups: Look-ups that were misses since no answer came in time.
        lost_events: Events of chunks that were lost, since too many waited.
    """

    failed_loads: int = 0
    failed_stores: int = 0
    dropped_stores: int = 0
    unanswered_lookups: int = 0
    lost_events: int = 0


def definitions(counter: Any, gauge: Any) -> dict[str, Any]:
    """Return vLLM's definitions of the metrics.

    Args:
        counter: vLLM's class of a counter's definition.
        gauge: That of a gauge's.

    Returns:
        A definition by name.
    """
    by_name = {name: counter(documentation=text) for name, text in COUNTERS.items()}
    for kind, texts in ((counter, PLACE_COUNTERS), (gauge, PLACE_GAUGES)):
        by_name |= {name: kind(documentation=text, labelnames=(PLACE,)) for name, (_, text) in texts.items()}
    return by_name


class StatsReader:
    """Reads the statistics of a store in a thread of its own: a place may have to read files for them. For one thread.

    Args:
        read: Returns the statistics. It may take long.
    """

    def __init__(self, read: Callable[[], ByteStoreStats]) -> None:
        self._read = read
        self._pool: ThreadPoolExecutor | None = None
        self._under_way: Future[ByteStoreStats] | None = None

    def begin(self) -> None:
        """Begin to read, unless that is under way."""
        if self._under_way is None:
            self._under_way = begun(self._submit)

    def take(self) -> ByteStoreStats | None:
        """Return the statistics that were read since the last call; None if there are none."""
        if self._under_way is None or not self._under_way.done():
            return None
        ended, self._under_way = self._under_way, None
        error = ended.exception()
        if error is not None:
            logger.error("statistics of the store could not be read", exc_info=error)
            return None
        return ended.result()

    def close(self) -> None:
        """End the thread as soon as its read is done."""
        if self._pool is not None:
            self._pool.shutdown(wait=False)

    def _submit(self) -> "Future[ByteStoreStats]":
        if self._pool is None:
            self._pool = started_pool(1, "kvpage-stats")
        return self._pool.submit(self._read)


class MetricsWriter:
    """Writes the changes since it wrote last into vLLM's payload."""

    def __init__(self) -> None:
        self._told: dict[tuple[str, tuple[str, ...]], float] = {}

    def write(self, payload: Any, counts: TierCounts, store: ByteStoreStats) -> Any:
        """Write the counters' growth and the gauges.

        Args:
            payload: vLLM's OffloadingConnectorStats, which is filled.
            counts: Of the tier.
            store: Of its store.

        Returns:
            The payload.
        """
        numbers = {"corrupt_records": store.corrupt_records, "tier_errors": store.tier_errors}
        for name in COUNTERS:
            field = name.removeprefix(PREFIX)
            self._grow(payload, name, numbers[field] if field in numbers else getattr(counts, field), ())
        for tier_name, tier in _named(store):
            for name, (field, _) in PLACE_COUNTERS.items():
                self._grow(payload, name, getattr(tier, field), (tier_name,))
            for name, (field, _) in PLACE_GAUGES.items():
                value = getattr(tier, field)
                if value is not None:  # the place is in trouble, or does not know
                    payload.set_gauge(name, value, (tier_name,))
        return payload

    def _grow(self, payload: Any, name: str, value: float, labels: tuple[str, ...]) -> None:
        growth = value - self._told.get((name, labels), 0)
        if growth > 0:
            self._told[name, labels] = value
            payload.increase_counter(name, growth, labels)


def _named(store: ByteStoreStats) -> list[tuple[str, ByteTierStats]]:
    """Return the store's tiers with a name for each: its number and its kind."""
    return [(f"{at} {tier.name}", tier) for at, tier in enumerate(store.tiers)]

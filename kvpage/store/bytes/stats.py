"""ByteStoreStats: the counters of a store of bytes, and the state of each of its tiers."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from kvpage.store.stack.tier_use import TierUse
from kvpage.store.tiers.tier import TierStats


@dataclass(frozen=True, slots=True)
class ByteTierStats:
    """One tier of a store of bytes: its state now, and counters since the store was made.

    Attributes:
        name: the tier's name.
        num_records: records that are there; None if the tier does not know, or is in trouble.
        num_bytes: bytes of these records, with their heads and digests; None likewise.
        capacity: bytes that there may be; None for no limit of the tier's own, or in trouble.
        evicted: records that went to make place for others.
        hits: records that `get_into` read from this tier.
        misses: records that `get_into` asked it for in vain; a record that a faster tier had is no miss.
        read_bytes: bytes of the hits.
        read_seconds: seconds that the hits took, verification included, summed over threads.
        written: records that `put` wrote to this tier.
        written_bytes: bytes of these records.
        write_seconds: seconds that writing took, failed tries included, summed over threads.
    """

    name: str
    num_records: int | None
    num_bytes: int | None
    capacity: int | None
    evicted: int
    hits: int
    misses: int
    read_bytes: int
    read_seconds: float
    written: int
    written_bytes: int
    write_seconds: float


@dataclass(frozen=True, slots=True)
class ByteStoreStats:
    """Counters since the store was made.

    Attributes:
        tiers: each tier, in the order of the configuration.
        corrupt_records: records that were dropped, since their bytes or their size were not right.
        tier_errors: calls of a tier that failed or ran out of time.
        promoted_records: records that were copied into a faster tier after a hit.
        lost_events: events that no listener was told, since too many waited.
    """

    tiers: tuple[ByteTierStats, ...]
    corrupt_records: int
    tier_errors: int
    promoted_records: int
    lost_events: int


def stats_of(
    names: Sequence[str],
    states: Sequence[TierStats | None],
    uses: Sequence[TierUse],
    counts: Mapping[str, int],
    lost_events: int,
) -> ByteStoreStats:
    """Return statistics of each tier's name, state (None in trouble) and use, of counters by name, and of events."""
    tiers = tuple(_tier(*row) for row in zip(names, states, uses, strict=True))
    return ByteStoreStats(
        tiers, counts["corrupt_records"], counts["tier_errors"], counts["promoted_chunks"], lost_events
    )


def _tier(name: str, state: TierStats | None, use: TierUse) -> ByteTierStats:
    now = state or TierStats(name, None, None, None)
    return ByteTierStats(name, now.num_records, now.num_bytes, now.capacity, now.evicted, **asdict(use))

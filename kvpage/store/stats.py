"""Counters of stores, and the state of their tiers: KVStoreStats, ByteStoreStats, and TierUse of each tier."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from kvpage.store.tiers.tier import TierStats

COUNTERS = ("query_tokens", "hit_tokens", "stored_chunks", "corrupt_records", "tier_errors", "promoted_chunks")


MEASURED_BYTES = 64 << 20  # of reads, from which their speed counts


@dataclass(slots=True)
class TierUse:
    """Records that a store read from a tier and wrote to it, since the store was made: see ByteTierStats.

    A tier that a read asked in vain, or that could not give the record, has a miss.
    """

    hits: int = 0
    misses: int = 0
    read_bytes: int = 0
    read_seconds: float = 0.0
    written: int = 0
    written_bytes: int = 0
    write_seconds: float = 0.0

    @property
    def bytes_per_second(self) -> float | None:
        """Of reads; None until enough were measured."""
        return self.read_bytes / self.read_seconds if self.read_bytes >= MEASURED_BYTES else None

    def note_hit(self, num_bytes: int, seconds: float) -> None:
        """Count a record that was read; or one that is there, with no bytes."""
        self.hits, self.read_bytes = self.hits + 1, self.read_bytes + num_bytes
        self.read_seconds += seconds

    def note_misses(self, count: int) -> None:
        """Count records that were not there."""
        self.misses += count

    def note_write(self, num_bytes: int | None, seconds: float) -> None:
        """Count a call that wrote a record of these bytes; None where it wrote none."""
        self.write_seconds += seconds
        if num_bytes is not None:
            self.written, self.written_bytes = self.written + 1, self.written_bytes + num_bytes


@dataclass(frozen=True, slots=True)
class KVStoreStats:
    """Counters since the store was made.

    Attributes:
        query_tokens: tokens that `retrieve` and `load_blocks` were asked for.
        hit_tokens: tokens that they found.
        stored_chunks: chunks that were new to a tier.
        corrupt_records: records that were dropped.
        tier_errors: calls of a tier that failed or ran out of time.
        promoted_chunks: records that were copied into a faster tier after a hit.
        tiers: the statistics of each tier; None for one in trouble.
        read_chunks: chunks that each tier has given, in the same order.
        refused: records that were there and counted as misses, by reason: "damaged"; "foreign", of another prompt or
            model; "codec", which is unknown here; "key", which is not here; "seal", which is broken; "plain", not
            sealed.
    """

    query_tokens: int
    hit_tokens: int
    stored_chunks: int
    corrupt_records: int
    tier_errors: int
    promoted_chunks: int
    tiers: tuple[TierStats | None, ...]
    read_chunks: tuple[int, ...] = ()
    refused: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        counts: Mapping[str, int],
        tiers: tuple[TierStats | None, ...],
        read_chunks: tuple[int, ...] = (),
        refused: Mapping[str, int] | None = None,
    ) -> "KVStoreStats":
        """Return statistics of `counts`, where absent names count 0, and of the attributes `tiers`, `read_chunks` and
        `refused`.
        """
        numbers = {name: counts[name] for name in COUNTERS}
        return cls(**numbers, tiers=tiers, read_chunks=read_chunks, refused=dict(refused or {}))

    @property
    def hit_rate(self) -> float:
        """Return the share of query tokens that were found, 0 to 1."""
        return self.hit_tokens / self.query_tokens if self.query_tokens else 0.0


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
        refused: records that were there and counted as misses, by reason, as of KVStoreStats.
    """

    tiers: tuple[ByteTierStats, ...]
    corrupt_records: int
    tier_errors: int
    promoted_records: int
    lost_events: int
    refused: Mapping[str, int] = field(default_factory=dict)


def byte_stats(
    names: Sequence[str],
    states: Sequence[TierStats | None],
    uses: Sequence[TierUse],
    counts: Mapping[str, int],
    lost_events: int,
    refused: Mapping[str, int],
) -> ByteStoreStats:
    """Return statistics of each tier's name, state (None in trouble) and use, of counters by name, of events, and of
    refused records by reason.
    """
    tiers = []
    for name, state, use in zip(names, states, uses, strict=True):
        now = state or TierStats(name, None, None, None)
        tiers.append(ByteTierStats(name, now.num_records, now.num_bytes, now.capacity, now.evicted, **asdict(use)))
    numbers = counts["corrupt_records"], counts["tier_errors"], counts["promoted_chunks"]
    return ByteStoreStats(tuple(tiers), *numbers, lost_events, dict(refused))

"""KVStoreStats: what a store has counted."""

from collections.abc import Mapping
from dataclasses import dataclass

from kvpage.store.tiers.tier import TierStats

COUNTERS = ("query_tokens", "hit_tokens", "stored_chunks", "corrupt_records", "tier_errors", "promoted_chunks")


@dataclass(frozen=True, slots=True)
class KVStoreStats:
    """Counters since the store was made. Tokens that were asked for with `retrieve` or `load_blocks`, and found.

    corrupt_records: that were dropped. tier_errors: calls of a tier that failed or ran out of time.
    """

    query_tokens: int
    hit_tokens: int
    stored_chunks: int
    corrupt_records: int
    tier_errors: int
    promoted_chunks: int
    tiers: tuple[TierStats | None, ...]

    @classmethod
    def of(cls, counts: Mapping[str, int], tiers: tuple[TierStats | None, ...]) -> "KVStoreStats":
        return cls(**{name: counts[name] for name in COUNTERS}, tiers=tiers)

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.query_tokens if self.query_tokens else 0.0

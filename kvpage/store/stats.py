"""KVStoreStats: the counters of a store."""

from collections.abc import Mapping
from dataclasses import dataclass

from kvpage.store.tiers.tier import TierStats

COUNTERS = ("query_tokens", "hit_tokens", "stored_chunks", "corrupt_records", "tier_errors", "promoted_chunks")


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
    """

    query_tokens: int
    hit_tokens: int
    stored_chunks: int
    corrupt_records: int
    tier_errors: int
    promoted_chunks: int
    tiers: tuple[TierStats | None, ...]
    read_chunks: tuple[int, ...] = ()

    @classmethod
    def of(
        cls, counts: Mapping[str, int], tiers: tuple[TierStats | None, ...], read_chunks: tuple[int, ...] = ()
    ) -> "KVStoreStats":
        """Return statistics of these counters.

        Args:
            counts: a number for each name; absent names count 0.
            tiers: as the attribute.
            read_chunks: as the attribute.

        Returns:
            The statistics.
        """
        return cls(**{name: counts[name] for name in COUNTERS}, tiers=tiers, read_chunks=read_chunks)

    @property
    def hit_rate(self) -> float:
        """Return the share of query tokens that were found, 0 to 1."""
        return self.hit_tokens / self.query_tokens if self.query_tokens else 0.0

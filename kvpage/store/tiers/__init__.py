"""Tiers: the interface of a place that keeps records, and the tier in host memory."""

from kvpage.store.tiers.tier import (
    Key,
    Reader,
    RecordGone,
    RecordInfo,
    Tier,
    TierError,
    TierRests,
    TierStats,
    Writer,
)

__all__ = ["Key", "Reader", "RecordGone", "RecordInfo", "Tier", "TierError", "TierRests", "TierStats", "Writer"]

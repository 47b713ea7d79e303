"""BlockResidency: how long cached blocks stay in a tier, and how long they are unused before they leave it. Sampled.

    cached ── in use ── idle ── in use ── idle ── gone
    |─────────────── lifetime ──────────────────|
                                         |─ idle ─|      since the last request that used it ended

Short lifetimes and short idle times mean that the tier is too small for its requests. A block comes, is used
and leaves in steps, whose times count.
"""

import random
from dataclasses import dataclass

from kvpage.observe.histogram import Histogram, HistogramStats
from kvpage.observe.tree_watch import ChangeKind, TreeChanges

_TIERS = ("device", "host")
_STORES = {ChangeKind.INSERTED: "device", ChangeKind.PROMOTED: "device", ChangeKind.WRITTEN: "host"}
_LEAVES = {ChangeKind.LEFT_DEVICE: "device", ChangeKind.LEFT_HOST: "host"}


@dataclass(frozen=True, slots=True)
class ResidencyStats:
    """Times of sampled blocks that have left a tier, in seconds.

    Attributes:
        lifetime: From the moment when a block came until it left.
        idle_time: From its last use until it left.
    """

    lifetime: HistogramStats
    idle_time: HistogramStats


class BlockResidency:
    """A listener of a TreeWatch. sample_rate: The part of the blocks, 0 to 1, whose times are taken."""

    def __init__(self, sample_rate: float, seed: int = 0) -> None:
        if not 0 <= sample_rate <= 1:
            raise ValueError(f"sample_rate must be in [0, 1], got {sample_rate!r}")
        self._sample_rate = sample_rate
        self._random = random.Random(seed)
        self._begins: dict[str, dict[int, int]] = {tier: {} for tier in _TIERS}  # of sampled blocks, by id
        self._lifetimes = {tier: Histogram() for tier in _TIERS}
        self._idle_times = {tier: Histogram() for tier in _TIERS}

    def stats(self) -> dict[str, ResidencyStats]:
        """Return the times by tier, "device" and "host"."""
        return {tier: ResidencyStats(self._lifetimes[tier].stats(), self._idle_times[tier].stats()) for tier in _TIERS}

    def tell(self, changes: TreeChanges) -> None:
        """Take the times of the blocks that came and left."""
        if changes.is_restart:  # how long these have been there is unknown
            self._begins = {tier: {} for tier in _TIERS}
            return
        for kind, block_id, value in changes.changes.tolist():
            if kind in _STORES:
                if self._random.random() < self._sample_rate:
                    self._begins[_STORES[kind]][block_id] = changes.now
            else:
                self._leave(_LEAVES[kind], block_id, value, changes.now)

    def _leave(self, tier: str, block_id: int, used_at: int, now: int) -> None:
        begin = self._begins[tier].pop(block_id, None)
        if begin is None:
            return
        self._lifetimes[tier].observe((now - begin) / 1e9)
        if used_at:
            self._idle_times[tier].observe(max(now - used_at, 0) / 1e9)

"""EngineStats: what an engine has done so far, and how full it is."""

from dataclasses import dataclass

from kvpage.blocks.moves import Kind
from kvpage.blocks.stats import BlockStats
from kvpage.observe.histogram import HistogramStats
from kvpage.observe.residency import ResidencyStats
from kvpage.serving.blending.connector import BlendStats
from kvpage.serving.loop.block_transfers import TransferStats
from kvpage.serving.loop.store_connector import StoreConnectorStats

__all__ = [
    "BlendStats",
    "BlockStats",
    "EngineStats",
    "HistogramStats",
    "ResidencyStats",
    "StoreConnectorStats",
    "TransferStats",
]


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the engine was made, and its state now.

    num_computed_tokens: whose K and V were computed; what a preemption made necessary again counts again.
    num_prompt_tokens, num_cached_tokens: of the requests that were admitted, and how many of these were found in the
        cache when they were first admitted.
    num_swaps: preemptions that kept on the host what was computed.
    num_used_blocks: held by running requests; cached blocks in nobody's use do not count.
    blocks: both tiers: use, hits and misses in tokens, evictions, demotions, promotions.
    transfers: blocks, bytes and seconds of moves, by kind.
    residency: how long blocks stay, by tier; None unless sampled.
    num_lost_events: batches of events that were dropped; None without events.
    store: what was asked of the store, loaded from it and stored; None without one.
    blend: segments that were looked up, reused and kept; None without blending.
    """

    num_steps: int
    num_computed_tokens: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    num_preemptions: int
    num_swaps: int
    num_finished: int
    num_running: int
    num_waiting: int
    num_used_blocks: int
    num_blocks: int
    blocks: BlockStats
    transfers: dict[Kind, TransferStats]
    residency: dict[str, ResidencyStats] | None
    num_lost_events: int | None
    store: StoreConnectorStats | None
    blend: BlendStats | None

    @property
    def hit_rate(self) -> float:
        return self.num_cached_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0

"""EngineStats: the counters of an engine, and how full it is."""

from dataclasses import dataclass, field

from kvpage.blocks.groups.window_blocks import WindowStats
from kvpage.blocks.moves import Kind
from kvpage.blocks.stats import BlockStats
from kvpage.observe.histogram import HistogramStats
from kvpage.observe.residency import ResidencyStats
from kvpage.serving.blending.connector import BlendStats
from kvpage.serving.loop.graphs.decode_graphs import GraphStats
from kvpage.serving.loop.moves.block_transfers import TransferStats
from kvpage.serving.loop.store_connector import StoreConnectorStats
from kvpage.serving.sessions.stats import SessionStats
from kvpage.serving.weights.engine_weights import WeightStats

__all__ = [
    "BlendStats",
    "BlockStats",
    "EngineStats",
    "GraphStats",
    "HistogramStats",
    "ResidencyStats",
    "SessionStats",
    "StoreConnectorStats",
    "TransferStats",
    "WeightStats",
    "WindowStats",
]


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the engine was made, and its state now.

    Attributes:
        num_steps: Forward passes.
        num_computed_tokens: Tokens whose K and V were computed; those computed again after a preemption count again.
        num_prompt_tokens: Tokens of the prompts that were admitted.
        num_cached_tokens: Tokens of these that were found in the cache at the first admission.
        num_generated_tokens: Tokens that were chosen.
        num_preemptions: Requests that gave their blocks back.
        num_swaps: Preempted requests that kept their K and V on the host.
        num_finished: Requests that have ended, aborted ones included.
        num_running: Requests that run now.
        num_waiting: Requests that wait now.
        num_used_blocks: Blocks that running requests hold; cached blocks that none uses do not count.
        num_blocks: All blocks of the device.
        blocks: Both tiers: use, hits and misses in tokens, evictions, demotions, promotions. `blocks.slots` has the
            states of a model that keeps some, and their checkpoints.
        transfers: Blocks, bytes and seconds of moves, by kind.
        residency: How long blocks stay, by tier; None unless sampled.
        num_lost_events: Batches of events that were dropped; None without events.
        store: Lookups, loads and stores; None without a store.
        blend: Segments that were looked up, reused and kept; None without blending.
        graphs: Captured decode steps; None on a CPU, and with enforce_eager.
        windows: The blocks of each window's layers, where they have some of their own.
        slot_bytes: Bytes of a state slot, and of the K and V beside it; 0 without states.
        weights: Their version, and adapters.
        numerics: What the bits of results depend on besides the model and the request; None without `same_bits`.
        sessions: Sessions, and the blocks that they retain.
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
    graphs: GraphStats | None = None
    windows: tuple[WindowStats, ...] = ()
    slot_bytes: int = 0
    numerics: str | None = None
    sessions: SessionStats = field(default_factory=SessionStats)
    weights: WeightStats = field(default_factory=WeightStats)

    @property
    def hit_rate(self) -> float:
        """The part of the prompts' tokens that were found in the cache, 0 to 1."""
        return self.num_cached_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0

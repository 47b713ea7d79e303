"""The numbers of an engine."""

from kvpage.serving.stats.engine_stats import (
    BlendStats,
    BlockStats,
    EngineStats,
    GraphStats,
    HistogramStats,
    ResidencyStats,
    SessionStats,
    StoreConnectorStats,
    TransferStats,
    WeightStats,
)
from kvpage.serving.stats.request_state import RequestState

__all__ = [
    "BlendStats",
    "BlockStats",
    "EngineStats",
    "GraphStats",
    "HistogramStats",
    "RequestState",
    "ResidencyStats",
    "SessionStats",
    "StoreConnectorStats",
    "TransferStats",
    "WeightStats",
]

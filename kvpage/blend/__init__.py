"""CacheBlend (Yao et al., EuroSys 2025): cached segments reused wherever they stand, and repaired."""

from kvpage.blend.config import BlendConfig
from kvpage.blend.executor import CacheBlendImpl
from kvpage.blend.indices import create_index, indices_to_mask, mask_to_indices
from kvpage.blend.interfaces import (
    BlendExecutor,
    BlendOutput,
    BlendRetriever,
    BlendRetrieverResult,
    BlendRetrieverTask,
)
from kvpage.blend.rotary import RotaryTables
from kvpage.blend.segments import MemorySegments, Reuse, Segment, SegmentSource
from kvpage.blend.selection import METRICS, Selection, select_tokens, token_deviation

__all__ = [
    "METRICS",
    "BlendConfig",
    "BlendExecutor",
    "BlendOutput",
    "BlendRetriever",
    "BlendRetrieverResult",
    "BlendRetrieverTask",
    "CacheBlendImpl",
    "MemorySegments",
    "Reuse",
    "RotaryTables",
    "Segment",
    "SegmentSource",
    "Selection",
    "create_index",
    "indices_to_mask",
    "mask_to_indices",
    "select_tokens",
    "token_deviation",
]

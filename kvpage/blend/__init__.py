"""CacheBlend (Yao et al., EuroSys 2025): cached segments reused wherever they stand, and repaired."""

from kvpage.blend.blocks import gather_turned, load_turned
from kvpage.blend.boundaries import ContentBoundaries
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
from kvpage.blend.retriever import (
    SegmentBlendRetriever,
    SegmentRetrieverTask,
    SegmentSource,
    SPTBlendRetriever,
    SPTBlendRetrieverTask,
)
from kvpage.blend.rotary import RotaryTables
from kvpage.blend.segment_store import Segment, SegmentStore
from kvpage.blend.segments import MemorySegments, Reuse, SegmentCache, SegmentKV
from kvpage.blend.selection import METRICS, Selection, select_tokens, token_deviation
from kvpage.blend.sensitivity import measure_sensitivity
from kvpage.blend.stored_segments import StoredSegments

__all__ = [
    "BlendExecutor",
    "BlendOutput",
    "BlendRetriever",
    "BlendRetrieverResult",
    "BlendRetrieverTask",
    "CacheBlendImpl",
    "ContentBoundaries",
    "METRICS",
    "BlendConfig",
    "MemorySegments",
    "Reuse",
    "SegmentCache",
    "StoredSegments",
    "SegmentKV",
    "RotaryTables",
    "SPTBlendRetriever",
    "SPTBlendRetrieverTask",
    "Segment",
    "SegmentBlendRetriever",
    "SegmentRetrieverTask",
    "SegmentSource",
    "SegmentStore",
    "Selection",
    "create_index",
    "gather_turned",
    "indices_to_mask",
    "load_turned",
    "mask_to_indices",
    "measure_sensitivity",
    "select_tokens",
    "token_deviation",
]

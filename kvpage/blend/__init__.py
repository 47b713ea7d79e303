"""CacheBlend (Yao et al., EuroSys 2025): cached segments are reused at any position, and repaired."""

from kvpage.blend.boundaries import ContentBoundaries
from kvpage.blend.config import BlendConfig
from kvpage.blend.indices import create_index, indices_to_mask, mask_to_indices
from kvpage.blend.rotary import RotaryTables
from kvpage.blend.segment_store import Segment, SegmentStore
from kvpage.blend.segments import MemorySegments, Reuse, SegmentCache, SegmentKV
from kvpage.blend.selection import METRICS, Selection, select_tokens, token_deviation
from kvpage.blend.sensitivity import measure_sensitivity
from kvpage.blend.stored_segments import StoredSegments

__all__ = [
    "METRICS",
    "BlendConfig",
    "ContentBoundaries",
    "MemorySegments",
    "Reuse",
    "RotaryTables",
    "Segment",
    "SegmentCache",
    "SegmentKV",
    "SegmentStore",
    "Selection",
    "StoredSegments",
    "create_index",
    "indices_to_mask",
    "mask_to_indices",
    "measure_sensitivity",
    "select_tokens",
    "token_deviation",
]

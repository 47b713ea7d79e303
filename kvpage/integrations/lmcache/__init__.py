"""CacheBlend in the shape of LMCache's blender: an executor and retrievers of segments, for loops written for it."""

from kvpage.integrations.lmcache.blocks import gather_rotated, load_rotated
from kvpage.integrations.lmcache.executor import CacheBlendImpl
from kvpage.integrations.lmcache.interfaces import (
    BlendExecutor,
    BlendOutput,
    BlendRetriever,
    BlendRetrieverResult,
    BlendRetrieverTask,
)
from kvpage.integrations.lmcache.retriever import (
    SegmentBlendRetriever,
    SegmentRetrieverTask,
    SegmentSource,
    SPTBlendRetriever,
    SPTBlendRetrieverTask,
)

__all__ = [
    "BlendExecutor",
    "BlendOutput",
    "BlendRetriever",
    "BlendRetrieverResult",
    "BlendRetrieverTask",
    "CacheBlendImpl",
    "SPTBlendRetriever",
    "SPTBlendRetrieverTask",
    "SegmentBlendRetriever",
    "SegmentRetrieverTask",
    "SegmentSource",
    "gather_rotated",
    "load_rotated",
]

"""Chunks that outlive the process and leave the machine."""

from kvpage.store.arriving_store import ArrivingStore, Expectation
from kvpage.store.block_store import BlockStore
from kvpage.store.bytes.byte_records import ByteRecords
from kvpage.store.bytes.byte_store import ByteStore, Later
from kvpage.store.bytes.events import ByteEvent, Follow
from kvpage.store.bytes.page_view import PageView
from kvpage.store.bytes.pieces import Pieces
from kvpage.store.config import ByteStoreConfig, KVStoreConfig
from kvpage.store.inspection import RecordSummary
from kvpage.store.kv_store import KVStore
from kvpage.store.layerwise_store import LayerwiseStore
from kvpage.store.load.block_chunks import metadata_of
from kvpage.store.load.layer_chunks import LayerChunks, Pin
from kvpage.store.load.layer_load import LayerLoad
from kvpage.store.placement import register_tier
from kvpage.store.records.keys import KVStoreMetadata
from kvpage.store.sealed.seal_keys import SealKeys
from kvpage.store.sealed.sealed_tier import SealedTier
from kvpage.store.stack.placed import Placed
from kvpage.store.states.state_records import StateRecords
from kvpage.store.stats import ByteStoreStats, ByteTierStats, KVStoreStats
from kvpage.store.tiers.tier import Tier, TierError, TierRests, TierStats

__all__ = [
    "ArrivingStore",
    "BlockStore",
    "ByteEvent",
    "ByteRecords",
    "ByteStore",
    "ByteStoreConfig",
    "ByteStoreStats",
    "ByteTierStats",
    "Expectation",
    "Follow",
    "KVStore",
    "KVStoreConfig",
    "KVStoreMetadata",
    "KVStoreStats",
    "Later",
    "LayerChunks",
    "LayerLoad",
    "LayerwiseStore",
    "PageView",
    "Pieces",
    "Pin",
    "Placed",
    "RecordSummary",
    "SealKeys",
    "SealedTier",
    "StateRecords",
    "Tier",
    "TierError",
    "TierRests",
    "TierStats",
    "metadata_of",
    "register_tier",
]

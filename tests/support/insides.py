"""The insides of the package that tests look into: a function for each, so that a redesign changes one place.

Of an engine, `Engine.debug` shows the parts.
"""

import torch

import kvpage._C as _C
from kvpage import BlockManager
from kvpage.blocks.sequences.sequences import Sequences
from kvpage.store import KVStore
from kvpage.store.stack.call_gate import HasGate
from kvpage.store.stack.tier_stack import TierStack
from kvpage.store.tiered_store import TieredStore
from kvpage.store.tiers.memory_tier import MemoryTier


def sequences_of(manager: BlockManager) -> Sequences:
    """The sequences on the device and off it."""
    return manager._sequences


def refuses_calls(store: HasGate) -> bool:
    """Whether a store refuses calls from now on, though some may be under way."""
    return store.gate._is_closed


def stack_of(store: TieredStore) -> TierStack:
    """The tiers of a store, with the calls that a store makes."""
    return store._tiers


def store_of(owner) -> TieredStore:
    """The store of a tier of vLLM, or of a storage of SGLang."""
    return owner._store


def names_of(store, keys: list[bytes]) -> list[bytes]:
    """The names under which the tiers of a ByteStore have the records."""
    return store._jobs._keys.of(keys)


def entries_of(tier: MemoryTier) -> dict:
    """The places of the records in a memory tier, by key."""
    return tier._entries


def nobody_reads(tier: MemoryTier) -> bool:
    return all(entry.num_readers == 0 for entry in entries_of(tier).values())


def slab_of(tier: MemoryTier) -> torch.Tensor:
    """The bytes of a memory tier."""
    return tier._slab


def gathered_by(store: KVStore, lanes) -> None:
    """Let a store's chunks pass through these lanes."""
    store._chunks._lanes = store._chunks._layer_lanes = lanes


def num_lent(lanes) -> int:
    """The lanes of a pool that are in use."""
    return lanes._num_used


def cached_rows(cache):
    """The rows of a KVPageCache."""
    return cache._rows


def stepper_of(live):
    """The thread of an AsyncEngine, with its inbox."""
    return live._stepper


def native_of(copier) -> _C.BlockCopier:
    """The native part of a copier of blocks."""
    return copier._native


def served_by(worker):
    """The engine and the tokenizer of a worker of Dynamo."""
    return worker._served


def stream_of(telemetry):
    """The events of a telemetry, with their publisher."""
    return telemetry._stream

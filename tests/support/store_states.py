"""States of random bytes, and stores of them beside chunks, for tests of a KVStore."""

import hashlib

import numpy as np
import torch
from support.store_kv import C, kv_of, make

from kvpage.layout.groups import StateLayout, StatePart
from kvpage.store import KVStore
from kvpage.store.states.state_records import StateRecords

LAYOUT = StateLayout.of_parts(
    [StatePart(0, "conv", 0, (3, 5), torch.float32), StatePart(1, "recurrent", 0, (2, 70), torch.bfloat16)]
)
OTHER_LAYOUT = StateLayout.of_parts(
    [StatePart(0, "conv", 0, (3, 5), torch.float32), StatePart(1, "recurrent", 0, (2, 70), torch.float16)]
)
KV_DTYPE = torch.float32  # as of store_kv


def state_of(tokens: list[int], namespace: bytes = b"", layout: StateLayout = LAYOUT) -> np.ndarray:
    """Bytes of a slot that are a function of all tokens."""
    seed = hashlib.sha256(repr((list(tokens), namespace)).encode()).digest()
    return np.random.default_rng(list(seed)).integers(0, 256, layout.slot_bytes, np.uint8)


def store_and_states(tiers=None, kv_dtype: torch.dtype | None = KV_DTYPE, **fields) -> tuple[KVStore, StateRecords]:
    store = make(tiers=tiers, **fields)
    return store, store.states(LAYOUT, kv_dtype)


def put_all(store: KVStore, states: StateRecords, tokens: list[int], position: int, namespace: bytes = b"") -> None:
    """K and V of the tokens before the position, and the state there."""
    prefix = tokens[:position]
    store.store(prefix, kv_of(prefix), namespace=namespace)
    assert states.put(prefix, state_of(prefix, namespace), namespace)


def found(states: StateRecords, tokens: list[int], namespace: bytes = b"") -> bool:
    """Whether the state after the tokens is there; then its bytes are right."""
    memory = np.full(states.layout.slot_bytes, 0xEE, np.uint8)
    is_there = states.get_into(tokens, memory, namespace)
    assert not is_there or np.array_equal(memory, state_of(tokens, namespace))
    return is_there


__all__ = ["C", "KV_DTYPE", "LAYOUT", "OTHER_LAYOUT", "found", "put_all", "state_of", "store_and_states"]

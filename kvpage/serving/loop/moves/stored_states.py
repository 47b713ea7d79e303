"""StoredStates: between the states of an engine and a store of chunks and states. It knows slots, and no requests.

store   a held checkpoint ─► K and V of its tokens ─► the state ─► the store
load    the store ─► K and V of the tokens into blocks ─► the state into a working slot ─► all of it, or a shorter one
"""

from collections.abc import Callable

import torch

from kvpage.blocks.explain import GroupReach
from kvpage.blocks.hybrid.looks.held import HeldCheckpoint
from kvpage.blocks.states import Ids
from kvpage.cache.cache_engine import CacheEngine
from kvpage.cache.state_cache import StateCache
from kvpage.store.block_store import BlockStore, TokenIds, is_count


class StoredStates:
    """The states and blocks of one engine, for the threads that load and store.

    Args:
        store: One that keeps states.
        cache: The blocks.
        slots: The states.
        make_moves: Makes all moves of blocks and states that are due; for the engine's thread.
    """

    def __init__(
        self, store: BlockStore, cache: CacheEngine, slots: StateCache, make_moves: Callable[[], object]
    ) -> None:
        self._store, self._cache, self._slots, self.make_moves = store, cache, slots, make_moves
        self.has_kv = bool(cache.gpu_cache)
        self._states = store.states(slots.layout, cache.layout.dtype if self.has_kv else None)

    @property
    def device(self) -> torch.device:
        """The device of blocks and slots."""
        return self._slots.device

    @property
    def slot_bytes(self) -> int:
        """Bytes of a state."""
        return self._slots.layout.slot_bytes

    def lookup(self, tokens: TokenIds, namespace: bytes) -> int:
        """Return the longest position that can be loaded, and leaves a token to compute."""
        return self._states.longest(tokens[:-1], namespace)

    def look(self, tokens: TokenIds, namespace: bytes) -> tuple[int, tuple[GroupReach, ...]]:
        """Return what `lookup` does, and what the states say of their groups."""
        explanation = self._states.explain(tokens, namespace)
        return explanation.num_cached_tokens, explanation.groups

    def prefetch(self, tokens: TokenIds, namespace: bytes) -> None:
        """Bring K and V of the tokens, and the state after them, nearer within the store."""
        if self.has_kv:
            self._store.prefetch(tokens, namespace=namespace)
        self._states.prefetch(tokens, namespace)

    def store_blocks(self, tokens: TokenIds, block_ids: Ids, namespace: bytes) -> int:
        """Store K and V of the tokens; return how many of them the store holds now."""
        if not self.has_kv:
            return len(tokens)
        num_stored: int = self._store.store_blocks(tokens, self._cache, block_ids, namespace=namespace)
        return num_stored

    def store(self, tokens: TokenIds, held: HeldCheckpoint, namespace: bytes) -> int:
        """Store a checkpoint and the K and V of its tokens; return its position, or 0 where the store lacks a part."""
        if self.store_blocks(tokens, held.block_ids, namespace) < len(tokens):
            return 0
        return len(tokens) if self._states.put(tokens, self._slots.slots[held.slot].cpu(), namespace) else 0

    def load(self, tokens: TokenIds, start: int, block_ids: Ids, slot: int, namespace: bytes) -> int:
        """Load K and V of tokens[start:] into blocks, and the state after all tokens into a slot.

        Where a part of that is damaged, or gone, the next shorter position that the store has is loaded.

        Returns:
            The position whose K, V and state are there; 0 for none. Other bytes of blocks and slot mean nothing.
        """
        end = len(tokens)
        while end > start and not self._load(tokens[:end], start, block_ids, slot, namespace):
            shorter = self.lookup(tokens[:end], namespace) if end > 1 else 0
            end = shorter if is_count(shorter) and shorter < end else 0
        return end if end > start else 0

    def _load(self, tokens: TokenIds, start: int, block_ids: Ids, slot: int, namespace: bytes) -> bool:
        """Do as `load`, for all of the tokens; return whether they are there."""
        if self.has_kv:
            end = self._store.load_blocks(tokens, self._cache, block_ids, start=start, namespace=namespace)
            if end != len(tokens):
                return False
        slot_bytes = self._slots.slots[slot]
        if slot_bytes.device.type == "cpu":
            return self._states.get_into(tokens, slot_bytes, namespace)
        state = torch.empty(len(slot_bytes), dtype=torch.uint8)
        is_there = self._states.get_into(tokens, state, namespace)
        slot_bytes.copy_(state)
        return is_there

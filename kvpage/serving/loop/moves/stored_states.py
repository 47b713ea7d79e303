"""StoredStates: states and the blocks before them, between an engine and a store of both. Prompts go on at any token.

    a save   a held checkpoint ─► K and V of its tokens ─► the state ─► the store
    a load   the store ─► K and V of the tokens into blocks ─► the state into a working slot ─► all of it, or a shorter
             one ─► commit, and the slot becomes a checkpoint: the request, admitted now, begins there

Where there is no shorter one, blocks and slot of the load are freed, and the request computes.
"""

from functools import partial
from typing import Any

import torch

from kvpage.blocks.explain import Explanation
from kvpage.blocks.groups.states.held_checkpoints import HeldCheckpoint
from kvpage.blocks.manager import BlockManager
from kvpage.blocks.sequence_state import Allocation, Ids
from kvpage.cache.cache_engine import CacheEngine
from kvpage.cache.state_cache import StateCache
from kvpage.serving.loop.moves.block_transfers import BlockTransfers
from kvpage.serving.loop.moves.store_load import StoreLoad
from kvpage.serving.loop.moves.stored_group import Hold, Loading, StoredGroup
from kvpage.store.block_store import BlockStore, TokenIds, is_count


class StoredStates(StoredGroup):
    """The states and blocks of one engine, in a store that keeps states. ValueError for another store.

    A checkpoint's slot, its tail block and its blocks are held until it is written: steps go on meanwhile.
    """

    def __init__(
        self,
        store: BlockStore,
        cache: CacheEngine,
        slots: StateCache,
        manager: BlockManager,
        transfers: BlockTransfers,
    ) -> None:
        self._has_kv = bool(cache.gpu_cache)
        if self._has_kv:
            store.check_engine(cache)
        self._states = store.states(slots.layout, cache.layout.dtype if self._has_kv else None)
        self._store, self._cache, self._slots = store, cache, slots
        assert manager.states is not None, "a model with states has their group"
        self._manager, self._group, self._transfers = manager, manager.states, transfers
        self.block_size, self.device = manager.block_size, slots.device

    def lookup(self, tokens: TokenIds, namespace: bytes) -> int:
        """Return the longest position that can be loaded, and leaves a token to compute."""
        return self._states.longest(tokens[:-1], namespace)

    def explain(self, tokens: TokenIds, namespace: bytes) -> Explanation:
        return self._states.explain(tokens, namespace)

    def prefetch(self, tokens: TokenIds, namespace: bytes) -> None:
        if self._has_kv:
            self._store.prefetch(tokens, namespace=namespace)
        self._states.prefetch(tokens, namespace)

    def num_cached(self, tokens: TokenIds, namespace: bytes) -> int:
        return self._manager.num_cached(tokens, namespace)

    def num_wanted(self, tokens: TokenIds, num_found: int) -> int:
        return min(num_found, len(tokens) - 1) if self._group.keeps_checkpoints else 0

    def num_usable(self, load: StoreLoad[Any], num_loaded: int) -> int:
        return num_loaded if num_loaded <= load.num_wanted else 0

    def keep_end(self, load: StoreLoad[Any]) -> None:
        self._manager.keep_end(load, goes_on=True)

    def begin_load(self, load: StoreLoad[Any], num_tokens: int, allocation: Allocation) -> Loading:
        self._make_moves()
        tokens, start, slot = load.tokens[:num_tokens], allocation.num_cached_tokens, self._group.slot_of(load)
        block_ids = allocation.block_ids[: -(-num_tokens // self.block_size)]
        return Loading(start, partial(self._load, tokens, start, block_ids, slot, load.namespace))

    def hold(self, tokens: TokenIds, namespace: bytes) -> Hold | None:
        checkpoints = self._group.hold(tokens, namespace)
        if not checkpoints.each:
            checkpoints.release()
            return None
        try:
            self._make_moves()
        except BaseException:
            checkpoints.release()
            raise
        last = checkpoints.each[-1]

        def store(tokens: TokenIds, namespace: bytes) -> int:
            return max(self._put(tokens[: point.num_tokens], point, namespace) for point in checkpoints.each)

        return Hold(last.num_tokens, last.block_ids, store, checkpoints.release)

    def _make_moves(self) -> None:
        self._transfers.run()
        self._group.do_moves(self._slots.do_move)

    # --- in threads ---------------------------------------------------------------------------------------------------

    def _put(self, tokens: TokenIds, point: HeldCheckpoint, namespace: bytes) -> int:
        """Store a checkpoint and the K and V of its tokens; return its position, or 0 where the store lacks a part."""
        if self._has_kv:
            num_stored = self._store.store_blocks(tokens, self._cache, point.block_ids, namespace=namespace)
            if num_stored < len(tokens):
                return 0
        return len(tokens) if self._states.put(tokens, self._slots.slots[point.slot].cpu(), namespace) else 0

    def _load(self, tokens: TokenIds, start: int, block_ids: Ids, slot: int, namespace: bytes) -> int:
        """Load K and V of tokens[start:] into blocks, and the state after all tokens into a slot.

        Where a part of that is damaged, or gone, the next shorter position that the store has is loaded. The position
        is returned; 0 for none. Other bytes of blocks and slot mean nothing.
        """
        end = len(tokens)
        while end > start and not self._load_all(tokens[:end], start, block_ids, slot, namespace):
            shorter = self.lookup(tokens[:end], namespace) if end > 1 else 0
            end = shorter if is_count(shorter) and shorter < end else 0
        return end if end > start else 0

    def _load_all(self, tokens: TokenIds, start: int, block_ids: Ids, slot: int, namespace: bytes) -> bool:
        """Do as `_load`, for all of the tokens; return whether they are there."""
        if self._has_kv:
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

"""StoredBlocks: blocks that all layers share, between an engine and its store."""

from functools import partial
from typing import Any

from kvpage.blocks.explain import Explanation
from kvpage.blocks.manager import BlockManager
from kvpage.blocks.sequence_state import Allocation
from kvpage.cache.cache_engine import CacheEngine
from kvpage.serving.loop.moves.block_transfers import BlockTransfers
from kvpage.serving.loop.moves.store_load import StoreLoad
from kvpage.serving.loop.moves.stored_group import Hold, Loading, StoredGroup
from kvpage.store.block_store import BlockStore, TokenIds


class StoredBlocks(StoredGroup):
    """The blocks of one engine. transfers: the manager's moves; they come before a load writes.

    Raises ValueError if the store cannot keep these blocks.
    """

    def __init__(self, store: BlockStore, cache: CacheEngine, manager: BlockManager, transfers: BlockTransfers) -> None:
        store.check_engine(cache)
        self._store, self._cache, self._manager, self._transfers = store, cache, manager, transfers
        self.block_size, self.device = manager.block_size, cache.device

    def lookup(self, tokens: TokenIds, namespace: bytes) -> int:
        return self._store.lookup(tokens, namespace=namespace)

    def explain(self, tokens: TokenIds, namespace: bytes) -> Explanation:
        return self._store.explain(tokens, namespace)

    def prefetch(self, tokens: TokenIds, namespace: bytes) -> object:
        return self._store.prefetch(tokens, namespace=namespace)

    def num_cached(self, tokens: TokenIds, namespace: bytes) -> int:
        return self._manager.num_cached(tokens, namespace)

    def num_seen(self, tokens: TokenIds, namespace: bytes) -> int:
        num_blocks: int = self._manager.tree.look(tokens[:-1], namespace)[0].shape[1]
        return num_blocks * self.block_size

    def begin_load(self, load: StoreLoad[Any], num_tokens: int, allocation: Allocation) -> Loading:
        self._transfers.run()
        size = self.block_size
        start, block_ids = allocation.num_cached_tokens // size * size, allocation.block_ids[: num_tokens // size]
        call = load.call(self._store, self._cache, block_ids, self._transfers.is_beside)
        return Loading(start, partial(call, start=start, namespace=load.namespace))

    def hold(self, tokens: TokenIds, namespace: bytes) -> Hold | None:
        """Hold whole blocks, up to the first that is not on the device."""
        tree = self._manager.tree
        match = tree.match(tokens, namespace, num_left_over=0, is_hit=False)
        if match.num_device_blocks < match.num_blocks:
            tree.trim(match)
        if match.num_blocks == 0:
            tree.release(match)
            return None
        block_ids = match.block_ids.copy()

        def store(tokens: TokenIds, namespace: bytes) -> int:
            return self._store.store_blocks(tokens, self._cache, block_ids, namespace=namespace)

        return Hold(match.num_tokens, block_ids, store, lambda: tree.release(match))
